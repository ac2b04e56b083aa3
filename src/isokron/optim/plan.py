"""Which parameters of a group are blocks of which batch, and which go to AdamW."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isokron.distributed import Place, Ranks, Sharing, assign, block_cost
from isokron.optim.averaging import Averages
from isokron.optim.blocks import Batch, Block, Row
from isokron.optim.cadence import refresh_delay, take_turns_
from isokron.optim.flat import FlatList, small_and_large
from isokron.optim.fused import FusedList
from isokron.optim.groups import state_dtype
from isokron.optim.parts import PartList
from isokron.optim.settings import LAYOUT
from isokron.optim.shared import Shared
from isokron.optim.waves import row_size, waves_of

State = MutableMapping[Tensor, Any]
Fused = FusedList | FlatList | PartList
Loads = dict[Ranks, list[float]]  # what each of the ranks that share work has to do in a step


@dataclass(frozen=True)
class Plan:
    """One group's parameters, each in the rows of batches or in a list for AdamW.

    `idle`: frozen when the plan was made, and so without state, until they show a gradient.
    """

    params: list[Tensor]
    layout: tuple[Any, ...]
    shaping: tuple[str, ...]
    idle: list[Tensor]
    waves: list[list[Batch]]  # what is worked on at once
    fused: list[Fused]
    averages: Averages | None
    loads: Loads

    @property
    def batches(self) -> list[Batch]:
        return [batch for wave in self.waves for batch in wave]

    def holds(self, group: Mapping[str, Any]) -> bool:
        """Whether the plan was made for this group as it is and has all that take part now."""
        params = group["params"]
        return (
            len(self.params) == len(params)
            and all(map(is_, self.params, params))
            and self.layout == layout(group, self.shaping)
            and all(param.grad is None for param in self.idle)
        )

    def zero_grads_(self) -> None:
        """Give back to flat lists the gradients that live in their buffers."""
        for fused in self.fused:
            if isinstance(fused, FlatList):
                fused.zero_grad_()

    def entries(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of every parameter: flat keys, plain tensors, views of the batches' rows."""
        entries: dict[Tensor, dict[str, Tensor]] = {}
        for batch in self.batches:
            for i, row in enumerate(batch.rows):
                entry = entries.setdefault(row.param, {"step": batch.step[i]})
                entry.update({f"{key}.{row.number}": v[i] for key, v in batch.stored().items()})
            if batch.shared is not None:
                for row, step in zip(batch.shared.rows, batch.shared.step, strict=True):
                    entries.setdefault(row.param, {"step": step})
        for fused in self.fused:
            entries |= {param: fused.row(i) for i, param in enumerate(fused.params)}
        if self.averages is not None:
            for i, param in enumerate(self.averages.params):
                entries[param].update(self.averages.entry(i))
        return entries

    def elsewhere(self) -> dict[Tensor, set[str]]:
        """Keys of the state of blocks that other processes own."""
        found: dict[Tensor, set[str]] = {}
        for batch in self.batches:
            own = {(row.param, row.number) for row in batch.rows}
            for row in batch.shared.rows if batch.shared is not None else ():
                if (row.param, row.number) not in own:
                    keys = found.setdefault(row.param, set())
                    keys |= {f"{key}.{row.number}" for key in batch.stored()}
        return found


def layout(group: Mapping[str, Any], shaping: tuple[str, ...]) -> tuple[Any, ...]:
    on = (group["momentum"] > 0, group["betas"][0] > 0, refresh_delay(group) > 0)
    staggered = group["refresh"] == "staggered"
    return (*on, staggered, *[group[key] for key in (*LAYOUT, *shaping)])


def build_plan(
    group: Mapping[str, Any],
    takes: Callable[[Tensor, Mapping[str, Any]], bool],
    cut: Callable[[Sequence[int], Mapping[str, Any]], list[Block]],
    state: Mapping[Tensor, Any],
    shaping: tuple[str, ...] = (),
    least: torch.dtype | None = None,
    sharing: Sharing | None = None,
    before: Loads | None = None,
    together: str = "block",
    work: str = "eigen",
) -> Plan:
    """Batches of equal blocks of what the method takes, lists for AdamW of the rest.

    `shaping`: settings of the method's own on which the form of its state depends. `least`: the
    least precision its state may have. `before`: what ranks have to do for other groups.
    `together`: what has one owner: a "block", or the blocks of a "part". `work`: as of
    `block_cost`, by which owners are chosen.
    """
    sharing = sharing or Sharing()
    rows: dict[tuple[Any, ...], list[Row]] = {}
    lists: dict[tuple[Any, ...], list[Tensor]] = {}
    places: dict[Tensor, Place] = {}
    idle: list[Tensor] = []
    for param in group["params"]:
        if param.numel() == 0:
            continue
        if not param.requires_grad and param.grad is None and not state.get(param):
            idle.append(param)
            continue
        kind: tuple[Any, ...] = (param.dtype, param.device)
        place = sharing.place(param)
        if place is not None:
            places[param] = place
            kind = (*kind, place.ranks, place.dim is None)
        if not takes(param, group):
            lists.setdefault(kind, []).append(param)
            continue
        for number, block in enumerate(cut(param.shape, group)):
            rows.setdefault((block.shape, *kind), []).append(Row(param, block, number))
    batches = []
    for equal in rows.values():
        dtype = state_dtype(equal[0].param, group)
        batches.append(Batch(equal, torch.promote_types(dtype, least) if least else dtype))
    fused: list[Fused] = []
    for params in lists.values():
        form = (state_dtype(params[0], group), group["amsgrad"])
        if params[0] in places:
            fused.append(PartList(params, [places[param] for param in params], *form))
            continue
        small, large = small_and_large(params) if group["flat"] else ([], params)
        fused += [FlatList(small, *form)] if small else []
        fused += [FusedList(large, *form)] if large else []
    if group["refresh"] == "staggered":
        take_turns_(batches, group)
    loads = {ranks: list(load) for ranks, load in (before or {}).items()}
    owners = _owned(batches, places, group, sharing, loads, together, work) if places else {}
    waves: dict[Any, list[Batch]] = {}
    for batch, numbers in zip(batches, _waves(batches, group, together, work), strict=True):
        for wave, those in groupby(range(len(numbers)), numbers.__getitem__):
            part = _cut(batch, list(those))
            if batch.rows[0].param in places:
                part = _divided(part, places, owners, sharing)
            key = (batch, wave) if together == "block" else wave
            waves.setdefault(key, []).append(part)
    stepped = [p for p in group["params"] if p.numel() and all(p is not q for q in idle)]
    averages = Averages(stepped, group) if group["average"] else None
    made_for = layout(group, shaping)
    ordered = list(waves.values())
    return Plan(list(group["params"]), made_for, shaping, idle, ordered, fused, averages, loads)


def _waves(
    batches: Sequence[Batch], group: Mapping[str, Any], together: str, work: str
) -> list[list[int]]:
    """The number of the wave of every row of every batch."""
    numbers = {param: i for i, param in enumerate(group["params"])}
    keys = [
        np.array(
            [
                (numbers[row.param] << 32) + (row.block.part if together == "part" else 0)
                for row in batch.rows
            ]
        )
        for batch in batches
    ]
    sizes = [row_size(batch.shape, group, work) * batch.dtype.itemsize for batch in batches]
    return [found.tolist() for found in waves_of(keys, sizes, group["workspace"], together)]


def _cut(batch: Batch, rows: list[int]) -> Batch:
    """Some rows of a batch that has no state yet."""
    if len(rows) == len(batch.rows):
        return batch
    part = Batch([batch.rows[i] for i in rows], batch.dtype)
    part.phase = batch.phase[rows]
    return part


def _owned(
    batches: Sequence[Batch],
    places: Mapping[Tensor, Place],
    group: Mapping[str, Any],
    sharing: Sharing,
    loads: Loads,
    together: str,
    work: str,
) -> dict[tuple[Tensor, int], int]:
    """The owner of every block of a parameter that is shared; `loads` grow in place."""
    shared = [batch for batch in batches if batch.rows[0].param in places]
    number = {param: i for i, param in enumerate(places)}
    owners: dict[tuple[Tensor, int], int] = {}
    for ranks in dict.fromkeys(place.ranks for place in places.values()):
        rows = [row for b in shared for row in b.rows if places[row.param].ranks == ranks]
        keys: dict[str, list[Any]] = {
            "block": [(number[row.param], row.number) for row in rows],
            "part": [(number[row.param], row.block.part) for row in rows],
        }
        costs = [block_cost(row.block.shape, group, work) for row in rows]
        load = loads.setdefault(ranks, [0.0] * ranks.size)
        found = _owners(rows, keys[together], costs, ranks, sharing, load)
        owners.update(zip([(row.param, row.number) for row in rows], found, strict=True))
    return owners


def _divided(
    batch: Batch,
    places: Mapping[Tensor, Place],
    owners: Mapping[tuple[Tensor, int], int],
    sharing: Sharing,
) -> Batch:
    """The same batch with the rows that this process owns."""
    at = [places[row.param] for row in batch.rows]
    owner = [owners[row.param, row.number] for row in batch.rows]
    whole = Shared(batch.rows, at, owner, sharing.communication_dtype)
    mine = Batch(whole.own, batch.dtype, whole)
    mine.phase = batch.phase[whole.travel.own]
    return mine


def _owners(
    rows: Sequence[Row],
    keys: Sequence[Any],
    costs: Sequence[float],
    ranks: Ranks,
    sharing: Sharing,
    load: list[float],
) -> list[int]:
    """Of every row; whoever has the state of a block keeps it, and of blocks of the same key."""
    names = [(ranks, row.number, row.block.shape) for row in rows]
    known = [
        sharing.owners.get(row.param, {}).get(name) for row, name in zip(rows, names, strict=True)
    ]
    kept: dict[Any, int] = {}
    for key, owner, cost in zip(keys, known, costs, strict=True):
        if owner is not None:
            load[owner] += cost
            if kept.setdefault(key, owner) != owner:
                raise RuntimeError(
                    "the blocks of a matrix must be on one rank, but their state is on several; "
                    "set split before the first step, or load a checkpoint into an optimizer that "
                    "is made with it"
                )
    new = [i for i, key in enumerate(keys) if key not in kept]
    fresh = [keys[i] for i in new]
    kept |= dict(zip(fresh, assign([costs[i] for i in new], fresh, load), strict=True))
    found = [kept[key] for key in keys]
    for row, name, owner in zip(rows, names, found, strict=True):
        sharing.owners.setdefault(row.param, {})[name] = owner
    return found
