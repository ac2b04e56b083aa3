"""One step of blocks: observe, refresh what is due, find the directions, write them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isokron.linalg import sent
from isokron.optim.blocks import Batch, Observed
from isokron.optim.cadence import rows_where, unready
from isokron.optim.grafting import graft, graft_direction
from isokron.optim.moments import counted, first_moment_
from isokron.optim.plan import Plan
from isokron.optim.spectral import spectral_direction
from isokron.optim.writing import Copies, Update, unowned, write_back

if TYPE_CHECKING:
    from isokron.optim.engine import Preconditioned


def step_blocks(method: "Preconditioned", plan: Plan, group: Mapping[str, Any]) -> None:
    """One step of all that the method takes, whoever owns it."""
    copies: Copies = {}
    waiting: list[Update] = []  # what is travelling does so while the next is found
    _call(plan.waves[:1], group)
    for i, wave in enumerate(plan.waves):
        _call(plan.waves[i + 1 : i + 2], group)
        observed = method.observed((_observe(method, batch, group) for batch in wave), group)
        found = (_update(method, seen, group) for seen in observed)
        updates = (update for update in found if update is not None)
        for update in _settled(method, updates, group):
            update.finish_(group)
            waiting.append(update)
            if update.coming is None or len(waiting) > 1:
                waiting.pop(0).write_(group, copies)
    for update in waiting:
        update.write_(group, copies)
    write_back(copies)


def _call(waves: Sequence[Sequence[Batch]], group: Mapping[str, Any]) -> None:
    """Let the gradients of waves begin to travel to the owners of their blocks."""
    weights = bool(group["weight_decay"]) and group["decay"] == "l2"
    for batch in (batch for wave in waves for batch in wave):
        if batch.shared is not None:
            batch.shared.call_(weights)


def _settled(
    method: "Preconditioned", updates: Iterable[Update], group: Mapping[str, Any]
) -> Iterable[Update]:
    """Updates one by one, or all of a wave at once where they depend on each other."""
    if group["graft"] or not method.settles:
        return updates
    held = list(updates)
    own = [update for update in held if update.tiles]
    if own:
        method.settle_(own, group)
    return held


def _observe(method: "Preconditioned", batch: Batch, group: Mapping[str, Any]) -> Observed:
    """Fold the gradients of the rows that have one into the statistics."""
    tiles = batch.present()
    if not tiles:
        return Observed(batch)
    rows = batch.numbers(tiles)
    at = None if len(rows) == len(batch.rows) else sent(rows, batch.device)
    state = batch.select(at)
    batch.step[slice(None) if at is None else rows] += 1
    step = batch.step if at is None else batch.step[rows]
    wide = torch.promote_types(batch.dtype, torch.float32)
    state["step"] = sent(step.to(wide), batch.device).view(-1, *[1] * len(batch.shape))

    grad = batch.gradients(tiles)
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"] and group["decay"] == "l2":
        grad = grad.add(batch.weights(tiles), alpha=group["weight_decay"])
    if group["route"] != "spectral":
        method.observe(grad, state, group)
    return Observed(batch, tiles, rows, at, state, grad)


def _update(method: "Preconditioned", seen: Observed, group: Mapping[str, Any]) -> Update | None:
    """Refresh what is due, and find the update. [B, ...]"""
    batch, rows, grad, state = seen.batch, seen.numbers, seen.grad, seen.state
    if grad is None:
        return unowned(batch)
    moment = _moment(method, grad, state, group)
    if group["route"] == "spectral":
        direction = spectral_direction(moment)
    else:
        if method.refreshes():
            method.refresher.run(method, batch, rows, state, group)
        direction = method.direction(grad if method.keeps_moment else moment, state, group)
    if group["graft"]:
        simple = graft_direction(grad, moment, state, group)
        direction = graft(direction, simple)
        if group["route"] != "spectral":
            # until its first refresh the method knows nothing: the grafted one steps alone
            early = rows_where(lambda turn: unready(turn, group), batch.turns(rows))
            if bool(early.any()):
                where = sent(early, grad.device).view_as(state["step"])
                direction = torch.where(where, simple, direction)
    return Update(batch, seen.at, seen.tiles, state, direction)


def _moment(
    method: "Preconditioned", grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
) -> Tensor:
    """The first moment as the method or the grafted one wants it; `grad` where none is kept."""
    if "momentum" not in state:
        return grad
    step = counted(state, group) if method.debias or group["graft"] else None
    ahead = group["nesterov"] and not method.heavy_ball
    return first_moment_(state["momentum"], grad, method.beta(group), ahead, step)
