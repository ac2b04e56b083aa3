"""Layout of a parameter group: batches of equal blocks, and lists of parameters for AdamW."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod, sqrt
from operator import is_
from typing import Any

import torch
from torch import Tensor

from isokron.block_layout import Block, cut_blocks
from isokron.distributed import (
    BlockExchange,
    Place,
    Ranks,
    StepAgreement,
    assign,
    block_cost,
    factored_sizes,
)
from isokron.optim.adamw_lists import CompactList, FusedList, PartList, is_quantized
from isokron.optim.averaging import Averages
from isokron.optim.blocks import Batch, BatchRow
from isokron.optim.flat_buffer import FlatList, small_and_large
from isokron.optim.gradient_checks import Forms, forms_of
from isokron.optim.param_groups import gets_method
from isokron.optim.refresh import last_common_step, staggered_shifts
from isokron.optim.settings import layout_settings, state_dtype

Group = Mapping[str, Any]
AdamWList = FusedList | FlatList | CompactList | PartList
Loads = dict[Ranks, list[float]]  # the work of each of the ranks that share parameters
Kind = tuple[Any, ...]  # what blocks of one batch, or parameters of one list, have in common

# Bytes of a batch: enough to keep a device busy; for a method of products and many passes on a CPU,
# what stays in the cache from one to the next.
WORKSPACE = 32 << 20
CPU_WORKSPACE = 2 << 20


def blocks_of(shape: Sequence[int], group: Group) -> list[Block]:
    """The blocks of a parameter."""
    return cut_blocks(
        shape,
        max_dim=group["max_dim"],
        order=group["order"],
        stacked=group["stacked"],
        split=group["split"],
        split_dim=group["split_dim"],
    )


def matrices_of(shape: Sequence[int], group: Group) -> list[Block]:
    """The blocks of a method that needs matrices."""
    return blocks_of(shape, {**group, "order": 2})


def full_rank_norm(shape: Sequence[int], group: Group) -> float:
    """√max(m, n): the spectral norm of an update of full rank with entries of a fixed size."""
    return sqrt(max(shape))


@dataclass(frozen=True)
class Traits:
    """How the engine treats a method.

    Args:
        cut: (shape, group) → blocks of a parameter.
        takes: (param, group) → whether the method steps it; AdamW steps the others.
        check: (group) raises a ValueError for settings of the method that cannot be right.
        operator: names of the state that `refresh` makes, up to a dot; delayed refreshes need them.
        moment: (grad, state, group) → the moment to step along, of a method that keeps the first
            moment in a form of its own;
            `direction` then gets the gradient.
        heavy_ball: the first moment's rate is betas[0], and `momentum` acts on the update.
        elementwise: any part of a parameter is stepped as in the whole, so FSDP1's flat shards too.
        squares: statistics hold squares, so gradients that overflow when squared are refused.
        debias: divide the first moment by 1 − βᵗ; not where its scale does not matter.
        work: how directions are found, by which blocks are shared among ranks: "eigen", "products"
            or "polar", see `isokron.distributed.block_cost`.
        norm: (shape, group) → spectral norm of the update of a block at lr = 1, up to a constant,
            by which learning rates are carried over to other widths, see docs/width.md.
    """

    cut: Callable[[Sequence[int], Group], list[Block]] = blocks_of
    takes: Callable[[Tensor, Group], bool] = gets_method
    check: Callable[[Group], None] | None = None
    operator: tuple[str, ...] = ()
    moment: Callable[[Tensor, Mapping[str, Tensor], Group], Tensor] | None = None
    heavy_ball: bool = False
    elementwise: bool = False
    squares: bool = False
    debias: bool = True
    work: str = "eigen"
    norm: Callable[[Sequence[int], Group], float] = full_rank_norm


@dataclass(frozen=True)
class GroupLayout:
    """One group's parameters, each in rows of batches or in a list for AdamW.

    Args:
        params: the group's parameters when the layout was made.
        forms: what they were like.
        settings: the group's `layout_settings` then.
        values: the group's settings when they were last checked.
        idle: parameters that were frozen, and so have no state until they have a gradient.
        waves: lists of batches that are worked on at once.
        adamw: lists of parameters that AdamW steps.
        averages: of the iterates, if the group has them.
        loads: the work of each rank after this group.
        shown: entries of `optimizer.state`, and the tensors in them.
    """

    params: list[Tensor]
    forms: Forms
    settings: dict[str, Any]
    values: dict[str, Any]
    idle: list[Tensor]
    waves: list[list[Batch]]
    adamw: list[AdamWList]
    averages: Averages | None
    loads: Loads
    shown: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    shown_tensors: list[Tensor] = field(default_factory=list)

    def fits(self, group: Group) -> bool:
        """Whether it was made for the settings of this group."""
        return self.settings == layout_settings(group, self.settings)

    def show(self) -> dict[Tensor, dict[str, Tensor]]:
        """The entries, for `optimizer.state`."""
        self.shown.clear()
        self.shown.update(self.entries())
        self.shown_tensors[:] = chain.from_iterable(map(dict.values, self.shown.values()))
        return self.shown

    def is_shown(self, state: Mapping[Tensor, Any]) -> bool:
        """Whether the state has the entries that were shown, with the tensors they had."""
        entries = map(state.get, self.shown)
        tensors = chain.from_iterable(map(dict.values, self.shown.values()))
        same = all(map(is_, entries, self.shown.values()))
        return same and all(map(is_, tensors, self.shown_tensors))

    @property
    def batches(self) -> list[Batch]:
        return [batch for wave in self.waves for batch in wave]

    def entries(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of every parameter: flat keys, and views of the tensors that steps work on."""
        entries: dict[Tensor, dict[str, Tensor]] = {}
        for batch in self.batches:
            for i, row in enumerate(batch.rows):
                entry = entries.setdefault(row.param, {"step": batch.step[i]})
                entry.update({f"{key}.{row.number}": v[i] for key, v in batch.saved().items()})
            if batch.exchange is not None:
                for param, step in zip(batch.exchange.params, batch.exchange.step, strict=True):
                    entries.setdefault(param, {"step": step})
        for params in self.adamw:
            entries |= {param: params.row(i) for i, param in enumerate(params.params)}
        if self.averages is not None:
            for i, param in enumerate(self.averages.params):
                entries[param].update(self.averages.entry(i))
        return entries


def build_layout(
    group: Group,
    *,
    takes: Callable[[Tensor, Group], bool],
    cut: Callable[[Sequence[int], Group], list[Block]],
    agreement: StepAgreement,
    has_state: Callable[[Tensor], bool],
    min_dtype: torch.dtype | None,
    by_layer: bool,
    work: str,
    keys: Iterable[str],
    loads: Loads | None = None,
) -> GroupLayout:
    """Batches of equal blocks of what the method takes, and lists for AdamW of the rest.

    Args:
        group: the parameter group.
        takes: whether the method steps a parameter.
        cut: the blocks of a parameter of this shape.
        agreement: which ranks share a parameter.
        has_state: whether a parameter has state, so that it is laid out though it is frozen.
        min_dtype: the least precision of the method's state.
        by_layer: whether blocks of one layer have one owner and are in one wave.
        work: how directions are found, by which blocks are given to ranks: see `block_cost`.
        keys: the optimizer's settings; what else a user keeps in a group changes nothing.
        loads: the work that ranks have for the groups before.
    """
    blocks: list[BatchRow] = []
    rows: dict[Kind, list[BatchRow]] = {}
    lists: dict[Kind, list[Tensor]] = {}
    places: dict[Tensor, Place] = {}
    idle: list[Tensor] = []
    for param in group["params"]:
        if param.numel() == 0:
            continue
        # frozen parameters take no memory until they are trained
        if not param.requires_grad and param.grad is None and not has_state(param):
            idle.append(param)
            continue
        kind: Kind = (param.dtype, param.device)
        place = agreement.place(param)
        if place is not None:  # blocks that other ranks share have batches of their own
            places[param] = place
            kind = (*kind, place.ranks, place.shards is None)
        if not takes(param, group):
            lists.setdefault(kind, []).append(param)
            continue
        for number, block in enumerate(cut(param.shape, group)):
            blocks.append(BatchRow(param, block, number))
            rows.setdefault((block.shape, *kind), []).append(blocks[-1])
    loads = {ranks: list(load) for ranks, load in (loads or {}).items()}
    owners = _owners(rows, places, group, agreement, loads, by_layer, work) if places else {}
    waves = []
    for wave in waves_of(rows, group, by_layer, work):
        batches = []
        for batch_rows in wave:
            dtype = state_dtype(batch_rows[0].param, group)
            dtype = torch.promote_types(dtype, min_dtype) if min_dtype else dtype
            batches.append(_batch(batch_rows, dtype, places, owners, agreement))
        waves.append(batches)
    stepped = [p for p in group["params"] if p.numel() and all(p is not q for q in idle)]
    layout = GroupLayout(
        list(group["params"]),
        forms_of(group["params"]),
        layout_settings(group, keys),
        {key: group[key] for key in keys},
        idle,
        waves,
        list(_adamw_lists(lists.values(), places, group)),
        Averages(stepped, group) if group["average"] else None,
        loads,
    )
    if group["refresh"] == "staggered":
        # of all blocks in the order of parameters, whoever owns them: ranks step as one process
        shifts = staggered_shifts([row.block.shape for row in blocks], group, work)
        by_block = {(r.param, r.number): shift for r, shift in zip(blocks, shifts, strict=True)}
        for batch in layout.batches:
            batch.shift[:] = torch.tensor(
                [by_block[r.param, r.number] for r in batch.rows], device="cpu"
            )
            batch.together = last_common_step(group)
    return layout


def _adamw_lists(
    lists: Sequence[list[Tensor]] | Any, places: Mapping[Tensor, Place], group: Group
) -> Iterator[AdamWList]:
    for listed in lists:
        form = (state_dtype(listed[0], group), group["amsgrad"])
        narrow = listed[0].dtype is torch.bfloat16 and group["rounding"] == "stochastic"
        kinds: dict[bool | None, list[Tensor]] = {}  # None: of a FusedList or FlatList
        for param in listed:
            kind = is_quantized(param, group) or (False if narrow else None)
            kinds.setdefault(kind, []).append(param)
        for quantized, params in kinds.items():
            if params[0] in places:
                yield PartList(params, [places[param] for param in params], *form, quantized)
                continue
            if quantized is not None:
                yield CompactList(params, *form, quantized)
                continue
            small, large = small_and_large(params) if group["flat"] else ([], params)
            if small:
                yield FlatList(small, *form)
            if large:
                yield FusedList(large, *form)


def waves_of(
    rows: Mapping[Kind, list[BatchRow]], group: Group, by_layer: bool, work: str
) -> Iterator[list[list[BatchRow]]]:
    """Batches of bounded size: the largest tensor of one takes at most `workspace` bytes.

    `by_layer`: a wave has all blocks of its layers, in several batches.
    """

    def size(kind: Kind) -> int:  # bytes of a block or of its factors, whichever are more
        factors = sum(size**2 for size in factored_sizes(kind[0], group, work))
        dtype = state_dtype(rows[kind][0].param, group)
        return max(prod(kind[0]), int(factors)) * dtype.itemsize

    def batches(kind: Kind, equal: list[BatchRow]) -> list[list[BatchRow]]:
        count = max(1, _workspace(kind, group, work) // size(kind))
        return [equal[i : i + count] for i in range(0, len(equal), count)]

    if not by_layer:
        for kind, equal in rows.items():
            yield from ([batch] for batch in batches(kind, equal))
        return
    layers: dict[tuple[Tensor, int], dict[Kind, list[BatchRow]]] = {}
    for kind, equal in rows.items():
        for row in equal:
            layers.setdefault((row.param, row.block.part), {}).setdefault(kind, []).append(row)
    wave: dict[Kind, list[BatchRow]] = {}
    filled = 0
    order = {param: i for i, param in enumerate(group["params"])}
    for _, blocks in sorted(layers.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        needed = sum(size(kind) * len(equal) for kind, equal in blocks.items())
        if wave and filled + needed > min(_workspace(kind, group, work) for kind in blocks):
            yield [batch for item in wave.items() for batch in batches(*item)]
            wave, filled = {}, 0
        for kind, equal in blocks.items():
            wave.setdefault(kind, []).extend(equal)
        filled += needed
    if wave:
        yield [batch for item in wave.items() for batch in batches(*item)]


def _workspace(kind: Kind, group: Group, work: str) -> int:
    """Bytes of the largest tensor of a batch, which has the size of the temporary tensors."""
    if group["workspace"] is not None:
        return int(group["workspace"])
    # not of blocks that ranks share, whose batches each travel by themselves, and not of methods
    # with decompositions, of which every core takes one
    small = work == "products" and kind[2:] == (torch.device("cpu"),)
    return CPU_WORKSPACE if small else WORKSPACE


def _batch(
    rows: list[BatchRow],
    dtype: torch.dtype,
    places: Mapping[Tensor, Place],
    owners: Mapping[tuple[Tensor, int], int],
    agreement: StepAgreement,
) -> Batch:
    """A batch of these rows, or of those among them that this process owns."""
    shape, device = rows[0].block.shape, rows[0].param.device
    if rows[0].param not in places:
        return Batch(rows, dtype, shape, device)
    exchange = BlockExchange(
        [row.param for row in rows],
        [row.number for row in rows],
        [row.block for row in rows],
        [places[row.param] for row in rows],
        [owners[row.param, row.number] for row in rows],
        agreement.communication_dtype,
    )
    return Batch([rows[i] for i in exchange.owned], dtype, shape, device, exchange)


def _owners(
    rows: Mapping[Kind, list[BatchRow]],
    places: Mapping[Tensor, Place],
    group: Group,
    agreement: StepAgreement,
    loads: Loads,
    by_layer: bool,
    work: str,
) -> dict[tuple[Tensor, int], int]:
    """The owner of every block of a shared parameter; `loads` grow in place.

    Blocks that have an owner keep it, because it holds their state.
    """
    order = {param: i for i, param in enumerate(places)}
    shared = [row for equal in rows.values() for row in equal if row.param in places]
    owners: dict[tuple[Tensor, int], int] = {}
    for ranks in dict.fromkeys(place.ranks for place in places.values()):
        blocks = [row for row in shared if places[row.param].ranks == ranks]
        keys = [(order[r.param], r.block.part if by_layer else r.number) for r in blocks]
        costs = [block_cost(row.block.shape, group, work) for row in blocks]
        load = loads.setdefault(ranks, [0.0] * ranks.size)
        assigned: dict[Any, int] = {}
        for row, key, cost in zip(blocks, keys, costs, strict=True):
            name = (ranks, row.number, row.block.shape)
            owner = agreement.owners.get(row.param, {}).get(name)
            if owner is not None:
                load[owner] += cost
                if assigned.setdefault(key, owner) != owner:
                    raise RuntimeError(
                        "blocks of a layer have to come together on one rank, and their state is "
                        "on several; set split before the first step, or load a checkpoint into an "
                        "optimizer that is made with it"
                    )
        # new blocks, the costliest first, go to the rank with the least work
        new = [i for i, key in enumerate(keys) if key not in assigned]
        new_keys = [keys[i] for i in new]
        new_owners = assign([costs[i] for i in new], new_keys, load)
        assigned |= dict(zip(new_keys, new_owners, strict=True))
        for row, key in zip(blocks, keys, strict=True):
            name = (ranks, row.number, row.block.shape)
            owners[row.param, row.number] = assigned[key]
            agreement.owners.setdefault(row.param, {})[name] = assigned[key]
    return owners
