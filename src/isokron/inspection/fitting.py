"""The fit of a task's model: on which examples, of which loss, of which layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from isokron.curvature import CrossEntropy, Curvature, Likelihood, capture, fit
from isokron.curvature.capture import Event
from isokron.curvature.likelihoods import Loss
from isokron.curvature.sites import find_sites
from isokron.inspection.plan import Plan
from isokron.inspection.progress import Silent, Watcher
from isokron.tasks import Batch, Task

IGNORED = -100  # a target that does not count


@dataclass
class Data:
    """Batches to go over as often as asked. terms: of the loss, seen in the last pass."""

    task: Task
    order: Tensor
    watcher: Watcher = field(default_factory=Silent)
    terms: int = 0
    passes: int = 0

    def __iter__(self) -> Iterator[Batch]:
        parts = self.order.split(self.task.batch_size)
        self.terms, self.passes = 0, self.passes + 1
        again = "" if self.passes == 1 else ", again in the eigenbases"
        self.watcher.began(f"fitting{again}", len(parts), "batch")
        for i, part in enumerate(parts, start=1):
            yield self.task.train.batch(part)
            self.watcher.advanced(i)

    def loss(self) -> Loss | Likelihood:
        """Of one prediction where the task says its logits, else of one example."""
        return CrossEntropy(self._scores, IGNORED) if self.task.logits else self._losses

    def _scores(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.task.logits is not None
        scores, targets = self.task.logits(model, batch)
        if scores.shape[:-1] != targets.shape or targets.is_floating_point():
            raise ValueError(
                f"task {self.task.name!r}: logits must return scores [..., classes] and integer "
                f"targets [...], got shapes {tuple(scores.shape)} and {tuple(targets.shape)} of "
                f"{targets.dtype}"
            )
        self.terms += int((targets != IGNORED).sum())
        return scores, targets

    def _losses(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = self.task.losses(model, batch)
        self.terms += losses.numel()
        return losses


def seeded_order(plan: Plan) -> Tensor:
    """Which training examples are fitted on: the first of a permutation."""
    generator = torch.Generator().manual_seed(plan.seed)
    return torch.randperm(len(plan.task.train), generator=generator)[: plan.examples]


def fit_curvature(
    model: nn.Module, plan: Plan, watcher: Watcher
) -> tuple[Curvature, int, list[str]]:
    """The curvature, over how many loss terms, and notes on what was left out."""
    model.eval()
    data = Data(plan.task, seeded_order(plan), watcher)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        names, notes = usable_layers(model, plan)
        curvature = fit(
            model,
            data,
            data.loss(),
            plan.method,
            fisher=plan.fisher,
            sharing=plan.sharing,
            layers=names,
            seed=plan.seed,
        )
    said = [str(warning.message) for warning in caught]
    return curvature, data.terms, list(dict.fromkeys([*notes, *said]))


def usable_layers(model: nn.Module, plan: Plan) -> tuple[list[str], list[str]]:
    """Layers that see every example by itself, and notes on the others.

    An embedding of positions that all examples share has one gradient for all, and no curvature
    can be made of their sum: it is no larger for twice the examples.
    """
    patterns = list(plan.layers) or None
    few = seeded_order(plan)[:2]
    once, twice = (_places(model, plan, order) for order in (few, torch.cat([few, few])))
    names, notes = [], []
    for site in find_sites(model, patterns):
        if site.name not in once:
            notes.append(f"{site.name} is left out: the loss does not use it.")
        elif twice[site.name] < 2 * once[site.name]:
            notes.append(
                f"{site.name} is left out: all examples of a batch share its input, so that "
                "their gradients come summed."
            )
        else:
            names.append(site.name)
    if not names:
        raise ValueError(f"no layer is left to inspect: {' '.join(notes)}")
    return names, notes


def _places(model: nn.Module, plan: Plan, order: Tensor) -> dict[str, int]:
    """In how many places, examples times positions, each layer is used for one batch."""
    seen: dict[str, int] = {}

    def count(event: Event) -> None:
        rows = event.grads.size(1) * event.grads.size(2)
        seen[event.site.name] = seen.get(event.site.name, 0) + rows

    with capture(model, list(plan.layers) or None, sink=count):
        plan.task.losses(model, plan.task.train.batch(order)).sum().backward()
    model.zero_grad()
    return seen
