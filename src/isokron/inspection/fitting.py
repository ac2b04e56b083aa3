"""The fit of a task's model: on which examples, and of which loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from isokron.curvature import CrossEntropy, Curvature, Likelihood, fit
from isokron.curvature.likelihoods import Loss
from isokron.inspection.layers import usable_layers
from isokron.inspection.plan import Plan
from isokron.tasks import Batch, Task
from isokron.training import Silent, Watcher

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


@dataclass(frozen=True, eq=False)
class Fitted:
    """terms: of the loss. places: gradients of a layer's outputs that one example makes.

    notes: what was left out, and what the fit warned of.
    """

    curvature: Curvature
    terms: int
    places: dict[str, int]
    notes: list[str]


def fit_curvature(model: nn.Module, plan: Plan, watcher: Watcher) -> Fitted:
    """The curvature of all layers that it can be known of."""
    model.eval()
    data = Data(plan.task, seeded_order(plan), watcher)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        places, notes = usable_layers(model, plan, data.order[:2])
        curvature = fit(
            model,
            data,
            data.loss(),
            plan.method,
            fisher=plan.fisher,
            sharing=plan.sharing,
            layers=list(places),
            seed=plan.seed,
        )
    said = [str(warning.message) for warning in caught]
    return Fitted(curvature, data.terms, places, list(dict.fromkeys([*notes, *said])))
