"""Passes over data that show what layers see, and leave the model as it was."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature.capture import Event, Watcher, without_autocast
from isokron.curvature.heads import Heads
from isokron.curvature.likelihoods import CrossEntropy, Likelihood, Loss, terms_and_weights
from isokron.curvature.sites import Site
from isokron.curvature.statistics import Uses, joined

Fold = Callable[[Site, Uses], None]


class Passes:
    """Passes over the data. Labels that are drawn are others in the next pass: eigenvalues that
    were measured on the draws a basis was made of would be those of the draws, not the model's."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss | Likelihood,
        fisher: str,
        dtype: torch.dtype,
        seed: int,
        sites: list[Site],
        batch_dim: int,
        masks: bool = True,
        part: int | None = None,
        record: bool = False,
    ) -> None:
        """`masks`: uses say which of their positions count, which costs a look at all gradients;
        where these are multiplied by inputs it does not matter, for they are 0 elsewhere. `part`:
        these batches are some of all, from this number on; whether all of them together have shown
        enough is for others to `check`. `record`: `losses` has the sums of the terms of the last
        batch's examples, whose labels are the data's own."""
        self.model, self.batches, self.loss, self.fisher = model, batches, loss, fisher
        self.dtype, self.seed, self.sites, self.batch_dim = dtype, seed, sites, batch_dim
        self.generator = torch.Generator().manual_seed(seed)
        self.masks, self.part, self.record = masks, part, record
        self.losses = torch.zeros(0)  # [N]
        self.times = 0  # over the data
        self.count, self.warned = 0.0, False
        self.shape: tuple[int | None, int] = None, 0  # examples, if they are known, and terms
        self.device = next(model.parameters()).device.type
        self.counted: Tensor | None = None
        self.waiting: dict[str, list[Event]] = {}
        self.heads = Heads(sites if fisher == "exact" and isinstance(loss, CrossEntropy) else [])
        self.head: Event | None = None  # with probabilities in the place of gradients

    def over(self, fold: Fold, after: Callable[[], None] = lambda: None) -> float:
        """Give every layer's uses in every pass to `fold`; how many loss terms there were.

        `after`: called at the end of a batch, which may have had many passes back.
        """
        terms, seen, mixed = 0.0, set[str](), set[str]()

        def sink(event: Event) -> None:
            name = event.site.name
            if self.head is not None and name == self.head.site.name:
                return
            seen.add(name)
            if self._mixes(*event.grads.shape[1:3]):
                mixed.add(name)
            events = self.waiting.setdefault(name, [])
            events.append(event)
            if len(events) >= watcher.calls[name]:
                self._fold(fold, self.waiting.pop(name))

        watcher = Watcher(self.sites, sink, self.batch_dim)
        with _frozen(self.model), torch.enable_grad():
            for number, batch in enumerate(self.batches, self.part or 0):
                if self.part is not None:
                    self.generator.manual_seed(_mixed(self.seed, number, self.times))
                watcher.calls.clear()
                self.head = None
                with watcher, self.heads:
                    self._there_and_back(batch, fold)
                if self.head is not None and self.count:
                    seen.add(self.head.site.name)
                    self._fold(fold, [self.head], "softmax")
                with self.plain():
                    after()
                terms += self.count
        if mixed and not self.warned:
            self.warned = True
            warnings.warn(
                f"{', '.join(sorted(mixed))} had fewer inputs than the batch has examples, as for "
                "positions that all examples share: its gradients come summed over examples, and "
                "its curvature is wrong; give it an input for each, or leave it out of `layers`",
                stacklevel=3,
            )
        self.times += 1
        if self.part is None:
            check(terms, [site.name for site in self.sites if site.name not in seen])
        return terms

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Statistics are no part of what the user has put under autocast."""
        with torch.no_grad(), without_autocast(self.device):
            yield

    def _there_and_back(self, batch: Any, fold: Fold) -> None:
        """A function of its own: the graph is gone when it ends, before the next batch has one."""
        for total, again in self._losses(batch):
            if not self.count:  # nothing to go back from, and maybe no example at all
                return
            _backward(total, again)
            # fewer gradients than uses: some were computed twice, or led nowhere
            for events in self.waiting.values():
                self._fold(fold, events)
            self.waiting.clear()

    def _fold(self, fold: Fold, events: list[Event], kind: str | None = None) -> None:
        with self.plain():
            uses = joined(events, self.dtype, self.counted if self.masks else None)
            fold(events[0].site, uses if kind is None else replace(uses, kind=kind))

    def _losses(self, batch: Any) -> Iterator[tuple[Tensor, bool]]:
        """What to go back from, and whether it is not the last of its graph."""
        loss = self.loss
        if not isinstance(loss, Likelihood):
            terms, weights = terms_and_weights(loss(self.model, batch))
            self._count(weights)
            self._record(terms, weights)
            yield (terms * weights.sqrt()).sum(), False
            return
        outputs, targets = loss.forward(self.model, batch)
        weights = loss.weights(targets)
        self._count(weights)
        fixed = outputs.detach()
        if self.fisher == "exact":
            self.head = self._softmax(fixed, weights)
            if self.head is not None and len(self.sites) == 1:
                return
            for part in _places(weights, self.batch_dim):
                for root in loss.roots(fixed):
                    slopes = root * part.sqrt().to(root.dtype).unsqueeze(-1)
                    yield Sloped.apply(outputs, slopes), True
            return
        if self.fisher == "sampled":
            shape = loss.drawn(fixed)
            uniform = torch.rand(shape, generator=self.generator, dtype=torch.float64)
            targets = loss.draw(fixed, uniform.to(fixed.device))
        if type(loss) is not CrossEntropy:  # a class made of it may have terms of its own
            terms, weights = terms_and_weights((loss.terms(outputs, targets), weights))
            self._record(terms, weights)
            yield (terms * weights.sqrt()).sum(), False
            return
        if self.record:
            terms, slopes = loss.terms_and_slopes(fixed, targets)
            self._record(terms, weights)
        else:
            slopes = loss.slopes(fixed, targets)
        if self.counted is not None:
            slopes *= weights.reshape(*slopes.shape[:-1], 1)
        total = Sloped.apply(outputs, slopes)
        del outputs, fixed, slopes  # logits of a large vocabulary are gone while others go back
        yield total, False

    def _record(self, terms: Tensor, weights: Tensor) -> None:
        if self.record:
            self.losses = (terms.detach() * weights).reshape(len(terms), -1).sum(1)

    def _softmax(self, logits: Tensor, weights: Tensor) -> Event | None:
        """The layer that made the logits, if one did: rows √w·p are all that is asked of it."""
        found = self.heads.of(logits)
        if found is None:
            return None
        site, inputs, outputs = found
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rows = (wide.softmax(-1) * weights.sqrt().to(wide.dtype).unsqueeze(-1)).view_as(outputs)
        see, dim = site.view, self.batch_dim
        return Event(site, see.inputs(inputs, dim), see.outputs(rows, dim))

    def _mixes(self, examples: int, places: int) -> bool:
        """Whether a layer that saw this many shares an input among examples of the batch."""
        those, terms = self.shape
        if those is None or examples == those:
            return False
        return examples < those or examples * places < terms

    def _count(self, weights: Tensor) -> None:
        """Remember how many terms count, and which: examples first."""
        self.count = float(weights.sum())
        # of one dimension, terms may be those of all positions of all examples
        examples = weights.size(self.batch_dim) if weights.ndim > 1 else None
        self.shape = examples, weights.numel()
        counted = weights > 0
        if bool(counted.all()):
            self.counted = None
        else:
            self.counted = counted.movedim(self.batch_dim, 0) if counted.ndim > 1 else counted


def check(terms: float, missing: list[str]) -> None:
    """Refuse passes in which nothing counted, or to some layers no gradient came."""
    if terms == 0:
        raise ValueError("batches must hold at least one loss term that counts, got none")
    if missing:
        raise ValueError(
            f"no gradient ever came to {', '.join(missing)}; name in `layers` only layers that "
            "the loss uses"
        )


def _mixed(seed: int, number: int, times: int) -> int:
    """A seed of a batch's own, another each time, which the batches before it have no part in."""
    return (seed + number * 0x9E3779B97F4A7C15 + times * 0xD1B54A32D192ED03) % 2**63


def _places(weights: Tensor, batch_dim: int) -> Iterator[Tensor]:
    """Weights of one term an example at a time: labels of others are independent of its own."""
    if weights.ndim == 1:
        yield weights
        return
    first = weights.movedim(batch_dim, 0)
    flat = first.reshape(len(first), -1)
    for place in range(flat.size(1)):
        if bool(flat[:, place].any()):
            part = torch.zeros_like(flat)
            part[:, place] = flat[:, place]
            yield part.view(first.shape).movedim(0, batch_dim)


class Sloped(torch.autograd.Function):
    """A number, of no meaning itself, that has these gradients in the outputs: Σ outputs ⊙ slopes
    would have them too, at the cost of two more copies."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return outputs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def _backward(total: Tensor, again: bool = False) -> None:
    if not total.requires_grad:
        raise ValueError(
            "the loss does not depend on any of the layers observed; name in `layers` those that "
            "it uses"
        )
    total.backward(retain_graph=again)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradient of a parameter is computed: outputs of layers are all that is asked for."""
    learned = [param for param in model.parameters() if param.requires_grad]
    for param in learned:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in learned:
            param.requires_grad_(True)
