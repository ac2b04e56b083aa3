"""What each rank keeps, sends and computes for an optimizer: its own blocks, owners and state.

Nothing is written twice: blocks are the optimizer's `cut`, the bytes of a block's state are those
of its state for a batch of one row on the meta device, owners are `assign`'s, and what travels is
counted by the functions that count real traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isokron.distributed import assign, block_cost
from isokron.distributed.agreement import AGREEMENT
from isokron.distributed.ownership import refresh_cost
from isokron.distributed.traffic import (
    padded_part,
    padded_rows,
    sent_by_gather,
    sent_by_reduce,
)
from isokron.optim.averaging import Averages
from isokron.optim.blocks import Batch, Row
from isokron.optim.cadence import refresh_delay
from isokron.optim.engine import Preconditioned
from isokron.optim.fused import FusedList
from isokron.optim.groups import state_dtype
from isokron.optim.plans import full_state, together
from isokron.optim.waves import row_size, waves_of
from isokron.planning.layouts import Layout
from isokron.planning.piles import Pile, keys_of, make_piles
from isokron.planning.speed import Speed


@dataclass(frozen=True)
class Load:
    """By rank, of those that share the work: bytes of state, bytes sent in a step, blocks owned,
    and flops of refreshes a step, of decompositions and of products. [size]"""

    state: np.ndarray
    sent: np.ndarray
    blocks: np.ndarray
    decompositions: np.ndarray
    products: np.ndarray

    def refresh_seconds(self, speed: Speed) -> np.ndarray:
        """A step, of every rank."""
        return self.decompositions / speed.decompositions + self.products / speed.products


def load_of(optimizer: Preconditioned, layout: Layout) -> Load:
    """Of an optimizer over parameters of which only shapes are looked at, all having gradients."""
    state, sent, blocks = np.zeros((3, layout.size), dtype=np.int64)
    load = Load(state, sent, blocks, *np.zeros((2, layout.size)))
    owned = [0.0] * layout.size  # of the groups before, which owners are chosen by
    if layout.shared:
        load.sent[:] += sent_by_reduce(AGREEMENT, layout.ranks)
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.numel() and p.requires_grad]
        method = [p for p in params if optimizer.takes(p, group)]
        taken = set(method)
        _add_method(load, optimizer, group, method, layout, owned)
        _add_adamw(load, group, [p for p in params if p not in taken], layout)
        if group["average"]:
            _add_averages(load, group, params, layout)
    return load


def _add_method(
    load: Load,
    optimizer: Preconditioned,
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    layout: Layout,
    owned: list[float],
) -> None:
    piles = make_piles(optimizer, group, params, layout)
    if not piles:
        return
    work = optimizer.work(group)
    costs = np.concatenate([np.full(len(p), block_cost(p.shape, group, work)) for p in piles])
    keys = keys_of(piles, together(optimizer)).tolist()
    owners = np.array(assign(costs.tolist(), keys, owned))
    waves = _waves(piles, optimizer, group)
    start = 0
    for pile, wave in zip(piles, waves, strict=True):
        own = owners[start : start + len(pile)]
        start += len(pile)
        count = np.bincount(own, minlength=layout.size)
        batch = _one_row(optimizer, group, pile)
        load.state[:] += count * _bytes(_row_state(optimizer, batch, group))
        load.blocks[:] += count
        if work == "polar" or optimizer.refreshes():
            flops = load.decompositions if work == "eigen" else load.products
            flops[:] += count * refresh_cost(pile.shape, group, work) / group["every"]
        if layout.shared:
            load.sent[:] += _sent(pile, own, wave, batch.dtype, group, layout)


def _waves(
    piles: Sequence[Pile], optimizer: Preconditioned, group: Mapping[str, Any]
) -> list[np.ndarray]:
    """The number of the wave of every block, by pile."""
    unit = together(optimizer)
    keys = [keys_of([pile], unit) for pile in piles]
    sizes = [
        row_size(pile.shape, group, optimizer.work(group))
        * _one_row(optimizer, group, pile).dtype.itemsize
        for pile in piles
    ]
    return waves_of(keys, sizes, group["workspace"], unit)


def _one_row(optimizer: Preconditioned, group: Mapping[str, Any], pile: Pile) -> Batch:
    """The first row alone, in the dtype that the engine gives its batch."""
    dtype = state_dtype(pile.param, group)
    # decompositions need float32, whatever state_dtype says
    dtype = torch.promote_types(dtype, torch.float32) if optimizer.operator else dtype
    return Batch([Row(pile.param, pile.cuts[0][1].first, 0)], dtype)


def _row_state(
    optimizer: Preconditioned, batch: Batch, group: Mapping[str, Any]
) -> Iterable[Tensor]:
    state = full_state(optimizer, batch, group)
    made = [v for key, v in state.items() if key.split(".")[0] in optimizer.operator]
    return [*state.values(), *(made if refresh_delay(group) else ())]


def _sent(
    pile: Pile,
    own: np.ndarray,
    waves: np.ndarray,
    dtype: torch.dtype,
    group: Mapping[str, Any],
    layout: Layout,
) -> np.ndarray:
    """Gradients to owners and directions back, less what a rank has itself. [size]"""
    numel = torch.Size(pile.shape).numel()
    back = (layout.communication or dtype).itemsize
    if not pile.sharded:
        ends = np.flatnonzero(np.diff(waves)) + 1
        rows = sum(padded_rows(part.tolist()) for part in np.split(own, ends))
        size = rows * numel * back
        return np.full(layout.size, sent_by_gather(size, layout.size))
    there = (layout.communication or pile.param.dtype).itemsize
    if group["weight_decay"] and group["decay"] == "l2":
        there *= 2  # parameters go along
    kept = np.bincount(own, weights=pile.kept(own), minlength=layout.size).astype(np.int64)
    made = np.bincount(own, minlength=layout.size) * numel
    return (pile.here() - kept) * there + (made - kept) * back


def _add_adamw(
    load: Load, group: Mapping[str, Any], params: Sequence[Tensor], layout: Layout
) -> None:
    lists: dict[torch.dtype, int] = {}  # elements a rank gives, of one collective a dtype
    for param in params:
        one = param.new_empty(1)
        each = _bytes(FusedList([one], state_dtype(param, group), group["amsgrad"]).state.values())
        if not layout.shared:
            load.state[:] += param.numel() * each
            continue
        load.state[:] += layout.part_sizes(param.shape) * each
        if param.ndim and not layout.sharded:
            size = padded_part(param.shape, layout.size)
            lists[param.dtype] = lists.get(param.dtype, 0) + size
    for dtype, size in lists.items():
        load.sent[:] += sent_by_gather(size * dtype.itemsize, layout.size)


def _add_averages(
    load: Load, group: Mapping[str, Any], params: Sequence[Tensor], layout: Layout
) -> None:
    """Of what a rank has of the parameters themselves."""
    for param in params:
        entry = Averages([param.new_empty(1)], group).entry(0)
        weight = _bytes([entry.pop("average_weight")])
        cut = layout.is_cut(param.shape)
        here = layout.part_sizes(param.shape) if cut else param.numel()
        load.state[:] += here * _bytes(entry.values()) + weight


def _bytes(values: Iterable[Any]) -> int:
    """Of tensors, and of tuples of them."""
    tensors = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
