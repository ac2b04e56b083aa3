"""Passes over data that show what layers see, and leave the model as it was."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature.events import Event, by_example, inputs_of, outputs_of
from isokron.curvature.hooks import Watcher
from isokron.curvature.layers import Layer
from isokron.curvature.losses import CrossEntropy, Likelihood, Loss, terms_and_weights
from isokron.curvature.positions import Masks
from isokron.curvature.statistics import Uses, joined
from isokron.linalg.precision import full_precision

Fold = Callable[[Layer, Uses], None]
MANY_PASSES = 1000  # backward passes a batch, from which on fisher="exact" is warned of


class Passes:
    """Forward and backward passes over the data, in eval mode.

    After a batch, `losses` [N] and `token_losses` [N, S] are those of its examples and positions,
    each times its weight; the latter is None where examples have one term each.

    Args:
        fisher: labels are the data's ("empirical"), drawn from the model ("sampled", other ones in
            every pass over the data: eigenvalues measured on the draws that a basis was made of
            would be those of the draws) or all ("exact").
        dtype: of the uses that are folded.
        weighting: a term of weight w has its gradient times √w ("sqrt", for statistics: Σ gg' is
            weighted by w, and uses say which positions count) or times w ("linear": gradients of
            Σ w·loss, which are 0 where a position does not count).
        first: number of the first batch among those of all ranks, which seeds drawn labels.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss | Likelihood,
        layers: list[Layer],
        *,
        fisher: str = "empirical",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        weighting: str = "sqrt",
        first: int = 0,
    ) -> None:
        check_one_device(model)
        self.model, self.batches, self.loss, self.layers = model, batches, loss, layers
        self.fisher, self.dtype, self.seed, self.first = fisher, dtype, seed, first
        self.weighting = weighting
        self.generator = torch.Generator()
        self.losses = torch.zeros(0)
        self.token_losses: Tensor | None = None
        self.passes = 0  # over the data
        self.count = 0.0  # sum of the weights of the last batch
        self.examples: int | None = None  # of the last batch, where that is known
        self.terms = 0  # of the last batch
        # [N], which examples of the last batch have a term that counts; None where all terms do
        self.weighted: Tensor | None = None
        self.waiting: dict[str, list[Event]] = {}
        # positions that one of many passes reaches, and whether they are being looked for
        self.masks, self.looks = Masks(), False
        self.reached: set[str] = set()  # layers that had a gradient in this pass over the data
        self.head: Event | None = None  # with probabilities in the place of gradients
        self.warned = False

    def over(
        self, fold: Fold, after: Callable[[], None] = lambda: None, *, check: bool = True
    ) -> None:
        """Fold the uses of every layer in every backward pass.

        after: called at the end of a batch, which may have had many backward passes.
        check: refuse data without terms and layers without gradients.
        """
        terms = 0.0
        self.reached.clear()
        self.number = 0  # of the batch among those of this process
        self.watcher = Watcher(self.layers, functools.partial(self._take, fold))
        with unchanged(self.model), torch.enable_grad():
            for number, batch in enumerate(self.batches, self.first):
                self.number = number - self.first
                # one seed for a batch in a pass, whichever batches came before it
                mixed = number * 0x9E3779B97F4A7C15 + self.passes * 0xD1B54A32D192ED03
                self.generator.manual_seed((self.seed + mixed) % 2**63)
                self._pass(batch, fold)
                with self.plain():
                    after()
                terms += self.count
        self.passes += 1
        if check:
            check_reached(terms, [x for x in self.layers if x.name not in self.reached])

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Statistics are no part of what the user has put under autocast or in TF32."""
        with torch.no_grad(), full_precision():
            yield

    def _pass(self, batch: Any, fold: Fold) -> None:
        """The forward and the backward passes of one batch."""
        # inputs and outputs of linear layers are held only where the logits may be one's outputs
        closed_form = self.fisher == "exact" and isinstance(self.loss, CrossEntropy)
        self.watcher.products = [] if closed_form else None
        self.watcher.calls.clear()
        self.head = None
        self.masks.clear()
        with self.watcher:
            self._backward_passes(batch, fold)
        self.watcher.products = None
        if self.head is not None and self.count:
            self.reached.add(self.head.layer.name)
            self._fold(fold, [self.head], "softmax")

    def _backward_passes(self, batch: Any, fold: Fold) -> None:
        # a function of its own: the graph is freed when it ends, before the next batch has one
        outside = None
        for total, again in self._totals(batch):
            if not self.count:  # no term to start from, and maybe no example at all
                return
            outside = leaves_of(total) if outside is None else outside
            with frozen(outside):
                _backward(total, again)
            # fewer gradients than uses: some were computed twice, or led nowhere
            for events in self.waiting.values():
                self._fold(fold, events)
            self.waiting.clear()

    def _take(self, fold: Fold, event: Event) -> None:
        name = event.layer.name
        if self.head is not None and name == self.head.layer.name:
            return
        self.reached.add(name)
        events = self.waiting.setdefault(name, [])
        events.append(event)
        # at once: what all layers have seen, held to the end, would be the activations once more
        if len(events) >= self.watcher.calls[name]:
            self._fold(fold, self.waiting.pop(name))

    def _fold(self, fold: Fold, events: list[Event], kind: str | None = None) -> None:
        masks = self.weighting == "sqrt"
        with self.plain():
            grouped = [by_example(event, self.examples, self.terms) for event in events]
            uses = joined(grouped, self.dtype, self.weighted, masks)
            if self.looks:
                self.masks.add(uses)
                return
            uses = uses if kind else self.masks.on(uses)
            fold(events[0].layer, uses if kind is None else replace(uses, kind=kind))

    def _totals(self, batch: Any) -> Iterator[tuple[Tensor, bool]]:
        """Scalars to go back from, and whether their graph is needed again."""
        loss = self.loss
        if not isinstance(loss, Likelihood):
            terms, weights = terms_and_weights(loss(self.model, batch))
            self._count(weights, batch)
            yield self._weighted(terms, weights), False
            return
        outputs, targets = loss.forward(self.model, batch)
        weights = loss.weights(targets)
        self._count(weights, batch)
        fixed = outputs.detach()
        if self.fisher == "exact":
            self._record(loss.terms(fixed, targets), weights)
            self.head = self._softmax(fixed, weights)
            if self.head is not None and len(self.layers) == 1:
                return
            self._warn_of_cost(outputs.shape)
            if weights.ndim > 1:  # each pass is of one position, and reaches those that it reads
                some = torch.rand(outputs.shape, generator=self.generator).to(outputs)
                self.looks = True
                yield Sloped.apply(outputs, some * (weights > 0).unsqueeze(-1)), True
                self.looks = False
            for slopes in hessian_roots(loss, fixed, weights):
                yield Sloped.apply(outputs, slopes), True
            return
        if self.fisher == "sampled":
            targets = loss.draw(fixed, self.generator)
        if type(loss) is not CrossEntropy:  # a subclass may have terms of its own
            terms, weights = terms_and_weights((loss.terms(outputs, targets), weights))
            yield self._weighted(terms, weights), False
            return
        terms, slopes = loss.terms_and_slopes(fixed, targets)
        self._record(terms, weights)
        if self.weighted is not None:  # weights are 0 or 1
            slopes *= weights.reshape(*slopes.shape[:-1], 1).to(slopes.dtype)
        total = Sloped.apply(outputs, slopes)
        del outputs, fixed, slopes  # logits of a large vocabulary are freed in the backward pass
        yield total, False

    def _weighted(self, terms: Tensor, weights: Tensor) -> Tensor:
        self._record(terms, weights)
        return (terms * (weights.sqrt() if self.weighting == "sqrt" else weights)).sum()

    def _record(self, terms: Tensor, weights: Tensor) -> None:
        rows = self._rows(terms.detach() * weights)
        self.losses = rows.sum(1)
        # a batch may know the names of its examples
        check = getattr(self.batches, "check_losses", None)
        if check is not None:
            check(self.number, self.losses)
        else:
            place = f"of batch {self.number}"
            refuse_nonfinite(self.losses, lambda row: f"example {row} {place}", "mend it")
        self.token_losses = rows if rows.size(1) > 1 else None

    def _rows(self, terms: Tensor) -> Tensor:
        """[N, S]: terms by example."""
        examples = len(terms) if self.examples is None else self.examples
        # a batch may be empty, where −1 would be any number
        return terms.reshape(examples, terms.numel() // max(1, examples))

    def _softmax(self, logits: Tensor, weights: Tensor) -> Event | None:
        """The use of the layer that made the logits, if one did, with rows √w·p for gradients: the
        exact Fisher of a softmax needs no more. Its only outputs must be these logits."""
        uses = self.watcher.products or []
        for layer, x, outputs, versions in uses:
            same = outputs.is_contiguous() and _memory(outputs) == _memory(logits)
            unchanged_since = versions == (x._version, outputs._version)
            if same and unchanged_since and sum(use[0] is layer for use in uses) == 1:
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                rows = wide.softmax(-1) * weights.sqrt().to(wide.dtype).unsqueeze(-1)
                return Event(layer, inputs_of(layer, x), outputs_of(layer, rows.view_as(outputs)))
        return None

    def _count(self, weights: Tensor, batch: Any) -> None:
        """Remember how many terms count, and of how many examples."""
        self.count, self.terms = float(weights.sum()), weights.numel()
        self.examples = _examples(weights, batch)
        counted = weights > 0
        self.weighted = None if bool(counted.all()) else self._rows(counted).any(1)

    def _warn_of_cost(self, shape: Sequence[int]) -> None:
        if not self.warned:
            warn_of_passes(shape)
        self.warned = True


def warn_of_passes(shape: Sequence[int]) -> None:
    """Warn of fisher="exact" with outputs of this shape, where that takes long."""
    passes = shape[-1] * prod(shape[1:-1])
    if passes > MANY_PASSES:
        warnings.warn(
            f"fisher='exact' takes {passes:,} backward passes a batch, one for each of "
            f"{shape[-1]:,} classes at each position; fisher='sampled' takes one",
            stacklevel=2,
        )


def _memory(rows: Tensor) -> tuple[Any, ...]:
    """Equal for contiguous views of the same rows."""
    return rows.data_ptr(), rows.numel(), rows.size(-1), rows.is_contiguous()


def _examples(weights: Tensor, batch: Any) -> int | None:
    """How many examples a batch has: the first dimension of terms, which a part of it has too."""
    lengths = set(_lengths(batch))
    if lengths and len(weights) not in lengths:
        raise ValueError(
            "loss must return one term an example, [N], or terms by example, [N, S], got shape "
            f"{list(weights.shape)} for a batch of tensors of length {sorted(lengths)}; where "
            "some positions have no loss, return [N, S] terms and weights, 0 for those, in "
            "place of the terms of the others"
        )
    return len(weights) if lengths or weights.ndim > 1 else None


def _lengths(batch: Any) -> Iterator[int]:
    """Of all tensors of a batch, and of all sequences of them."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield len(batch)
    elif isinstance(batch, Mapping):
        yield from _lengths(list(batch.values()))
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for item in batch:
            yield from _lengths(item)


def refuse_nonfinite(losses: Tensor, name: Callable[[int], str], remedy: str) -> None:
    """Refuse losses [N] that are not finite; name: of an example by its index."""
    finite = losses.isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        raise FloatingPointError(f"{name(row)} has a loss of {float(losses[row]):g}; {remedy}")


def check_reached(terms: float, without: Iterable[Layer]) -> None:
    """Refuse passes without a term that counted, or with layers that no gradient came to."""
    if terms == 0:
        raise ValueError("batches must hold at least one loss term that counts, got none")
    # an expert may have had no token
    missing = [layer.name for layer in without if layer.observed != "experts"]
    if missing:
        raise ValueError(
            f"no gradient ever came to {', '.join(missing)}: the loss does not use it; leave it "
            f"out by layers='{','.join('!' + name for name in missing)}'"
        )


def hessian_roots(loss: Likelihood, outputs: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """Gradients in the outputs whose squares add up to the exact Fisher, one backward pass each.

    One term of every example at a time: labels of others are independent of its own.
    """
    flat = weights.reshape(len(weights), -1)
    for place in range(flat.size(1)):
        if bool(flat[:, place].any()):
            part = torch.zeros_like(flat)
            part[:, place] = flat[:, place]
            for root in loss.roots(outputs):
                yield root * part.view_as(weights).sqrt().to(root.dtype).unsqueeze(-1)


def sampled_slopes(
    loss: Likelihood, outputs: Tensor, weights: Tensor, generator: torch.Generator
) -> Tensor:
    """Gradients in the outputs of the loss of labels drawn from the model, each times √weight."""
    labels = loss.draw(outputs, generator)
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        terms = loss.terms(leaf, labels)
        (slopes,) = torch.autograd.grad((terms * weights.sqrt().to(terms.dtype)).sum(), leaf)
    return slopes


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


def leaves_of(total: Tensor) -> list[Tensor]:
    """Tensors that a backward pass from here adds gradients to, such as the parameters of modules
    outside the model that the loss uses."""
    nodes = [total.grad_fn]
    visited = set(nodes)
    leaves = []
    for node in nodes:  # grows
        if node is None:
            continue
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
        following = {function for function, _ in node.next_functions} - visited
        visited |= following
        nodes += following
    return leaves


@contextmanager
def frozen(leaves: Iterable[Tensor]) -> Iterator[None]:
    """No gradient is added to these tensors within the context."""
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    for leaf in learned:
        leaf.requires_grad_(False)
    try:
        yield
    finally:
        for leaf in learned:
            leaf.requires_grad_(True)


def check_one_device(model: nn.Module) -> None:
    """Refuse a model that is spread over devices or offloaded, as device_map="auto" does."""
    devices = sorted({str(param.device) for param in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ValueError(
            f"model must be on one device, got parameters on {', '.join(devices)}; load it "
            "without device_map, or with a device_map of one device such as {'': 0}"
        )


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients of parameters within the context; both are restored after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with frozen(model.parameters()):
            yield
    finally:
        # one by one: train() would set all modules below to the same mode
        for module, mode in modes:
            module.training = mode
