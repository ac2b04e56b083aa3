"""Which layers of a model have a curvature that can be known, as a trial shows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isokron.curvature import capture
from isokron.curvature.capture import Event
from isokron.curvature.sites import find_sites
from isokron.inspection.plan import Plan


def usable_layers(model: nn.Module, plan: Plan, few: Tensor) -> tuple[dict[str, int], list[str]]:
    """Layers that see every example by itself, in how many places, and notes on the others.

    few: training examples to try it with. An embedding of positions that all examples share has
    one gradient for all, of whose sum no curvature can be made: it is no larger for twice as many.
    """
    patterns = list(plan.layers) or None
    once, twice = (_places(model, plan, order) for order in (few, torch.cat([few, few])))
    places: dict[str, int] = {}
    notes = []
    for site in find_sites(model, patterns):
        if site.name not in once:
            notes.append(f"{site.name} is left out: the loss does not use it.")
        elif twice[site.name] < 2 * once[site.name]:
            notes.append(
                f"{site.name} is left out: all examples of a batch share its input, so that "
                "their gradients come summed."
            )
        else:
            places[site.name] = 1 if plan.sharing == "reduce" else once[site.name] // len(few)
    if not places:
        raise ValueError(f"no layer is left to inspect: {' '.join(notes)}")
    return places, notes


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
