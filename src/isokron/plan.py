"""Plan optimizers on many ranks: state, traffic and computation, from the shapes of a model.

Parameters are on the meta device. The optimizer lays out one parameter of each shape; the blocks
and the state of the others are counted, and blocks get their owners as in a real step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from isokron.distributed.block_exchange import block_parts, directions_traffic
from isokron.distributed.block_owners import EIGEN_FLOPS, assign, block_cost, refresh_cost
from isokron.distributed.dtensor import chunk_bounds, padded_part, row_shards
from isokron.distributed.process_group import sent_by_gather, sent_by_reduce
from isokron.distributed.step_agreement import AGREEMENT_BYTES
from isokron.optim import AdamW, NaturalGradient, param_groups
from isokron.optim.blocks import BatchRow
from isokron.optim.layout import GroupLayout, waves_of
from isokron.optim.preconditioned import Group, Preconditioned
from isokron.optim.refresh import staggered_shifts
from isokron.optim.settings import added_decay, refresh_delay
from isokron.report.render import finite
from isokron.step_schedule import BatchWork, span

# Later turns are counted as the first ones again, which bounds the memory of a plan.
MAX_TURNS = 1000

Kind = tuple[Any, ...]  # of a block: its shape, the parameter's dtype, whether it is sharded


@dataclass(frozen=True)
class RankLayout:
    """How ranks hold the parameters.

    Args:
        kind: "ddp": whole; "fsdp": sharded over all ranks; "hsdp": over groups of `shard`.
        ranks: number of processes.
        shard: ranks that share one copy of the parameters, with "hsdp" only.
        communication: dtype in which blocks are sent; default: their own.
    """

    kind: str
    ranks: int
    shard: int | None = None
    communication: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("ddp", "fsdp", "hsdp"):
            raise ValueError(f"layout must be one of ddp, fsdp, hsdp, got {self.kind!r}")
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {self.ranks}")
        if (self.shard is None) == (self.kind == "hsdp"):
            raise ValueError(f"shard must be given with hsdp and only then, got {self.shard}")
        if self.shard is not None and (self.shard < 1 or self.ranks % self.shard):
            raise ValueError(f"shard must divide the {self.ranks} ranks, got {self.shard}")

    @property
    def size(self) -> int:
        """Ranks that share one copy of the optimizer's state."""
        return self.shard or self.ranks

    def is_sharded(self, param: Tensor) -> bool:
        """Whether ranks have parts of a parameter; a scalar is always whole."""
        return self.kind != "ddp" and param.ndim > 0


class RankCosts(NamedTuple):
    """Costs of every rank that shares one copy of the state. [R] each

    `state`: bytes. `sent`: bytes a step, NaN if unknown. `blocks`: how many the rank owns.
    `decompositions`, `products`: flops of refreshes a step, by the turn in which blocks are
    refreshed; without turns, in row 0. [T, R] `decomposition_span`, `product_span`: flops after
    which a step has all of them, by turn, as ranks wait for each other. [T]
    """

    state: np.ndarray
    sent: np.ndarray
    blocks: np.ndarray
    decompositions: np.ndarray
    products: np.ndarray
    decomposition_span: np.ndarray
    product_span: np.ndarray


def plan(optimizer: torch.optim.Optimizer, layout: RankLayout) -> RankCosts:
    """Costs of a step in which all parameters have gradients."""
    state, sent, blocks = np.zeros((3, layout.size), dtype=np.int64)
    staggered = [g["every"] for g in optimizer.param_groups if g.get("refresh") == "staggered"]
    turns = min(max(staggered, default=1), MAX_TURNS)
    work, spans = np.zeros((2, turns, layout.size)), np.zeros((2, turns))
    costs = RankCosts(state, sent, blocks, *work, *spans)
    costs.sent[:] = sent_by_reduce(AGREEMENT_BYTES, layout.ranks)
    if isinstance(optimizer, NaturalGradient):
        return _natural_gradient(costs, optimizer, layout)
    if not isinstance(optimizer, Preconditioned):
        raise ValueError(f"a {type(optimizer).__name__} cannot be planned; use one of isokron's")
    loads = [0.0] * layout.size
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.numel() and p.requires_grad]
        method = [param for param in params if optimizer.traits.takes(param, group)]
        adamw = [param for param in params if not optimizer.traits.takes(param, group)]
        # "auto" compares a parameter with its neighbours, which are not in a sample
        route = "method" if group["route"] == "auto" else group["route"]
        for routed, to in ((method, route), (adamw, "adamw")):
            distinct = {_form(param): param for param in reversed(routed)}
            changes = {"params": list(distinct.values()), "route": to, "flat": False}
            sample = optimizer.new_layout({**group, **changes}, None)
            if sample.batches:
                _add_blocks(costs, optimizer, group, routed, sample, layout, loads)
            _add_elements(costs, routed, sample, layout)
    return costs


def _form(param: Tensor) -> tuple[torch.Size, torch.dtype]:
    return param.shape, param.dtype


def state_bytes(entry: Mapping[str, Tensor]) -> int:
    """Bytes of an entry of `optimizer.state`, but for its step counter."""
    return sum(value.nbytes for key, value in entry.items() if not key.endswith("step"))


def _natural_gradient(costs: RankCosts, optimizer: Any, layout: RankLayout) -> RankCosts:
    """Every rank keeps all of the state, and decompositions are divided among them."""
    if layout.kind != "ddp":
        raise ValueError(f"layout must be ddp for NaturalGradient, got {layout.kind}")
    optimizer._make_state()
    optimizer._show()
    entries = list(optimizer.state.values())
    costs.state[:] = sum(map(state_bytes, entries))
    if optimizer._adamw is not None:
        costs.state[:] += plan(optimizer._adamw, RankLayout("ddp", 1)).state
    bases = [value for entry in entries for key, value in entry.items() if "basis." in key]
    flops = [EIGEN_FLOPS * len(basis) * basis.size(-1) ** 3 for basis in bases]
    owners = assign(flops, range(len(flops)), [0.0] * layout.size)
    np.add.at(costs.decompositions[0], owners, np.divide(flops, optimizer.param_groups[0]["every"]))
    np.add.at(costs.blocks, owners, 1)
    costs.decomposition_span[:] = costs.decompositions.max(1)
    return costs._replace(sent=np.full(layout.size, np.nan))


def _add_blocks(
    costs: RankCosts,
    optimizer: Preconditioned,
    group: Group,
    params: Sequence[Tensor],
    sample: GroupLayout,
    layout: RankLayout,
    loads: list[float],
) -> None:
    """Add parameters that the method steps; `loads`: work of the ranks, added to in place."""
    work = optimizer.work(group)
    by_layer = type(optimizer).directions is not Preconditioned.directions
    rows: dict[Kind, list[BatchRow]] = {}  # as the engine has them
    parts: dict[Kind, list[tuple[np.ndarray, np.ndarray]]] = {}  # see _held; by parameter
    sequence: list[Kind] = []  # of all blocks, in the order of parameters
    cut = _cut(sample, layout)
    for param in params:
        for kind, (equal, held) in cut[_form(param)].items():
            parts.setdefault(kind, []).append(held)
            # whose a block is matters only where one rank owns all blocks of a layer
            named = [BatchRow(param, row.block, 0) for row in equal if by_layer]
            rows.setdefault(kind, []).extend(named or equal)
            sequence += [kind] * len(equal)
    counts = [len(equal) for equal in rows.values()]
    keys = [(id(r.param), r.block.part) for equal in rows.values() for r in equal if by_layer]
    work_costs = np.repeat([block_cost(kind[0], group, work) for kind in rows], counts)
    assigned = np.array(assign(work_costs.tolist(), keys or range(len(work_costs)), loads))
    owners = dict(zip(rows, np.split(assigned, np.cumsum(counts)[:-1]), strict=True))
    batches = {_kind(batch.rows[0], layout): batch for batch in sample.batches}
    eigen = work == "eigen"
    refreshes = costs.decompositions if eigen else costs.products
    spans = costs.decomposition_span if eigen else costs.product_span
    added = np.zeros_like(refreshes)
    flops: dict[Kind, float] = {}
    turns: dict[Kind, list[int]] = {kind: [] for kind in rows}
    if group["refresh"] == "staggered":
        shifts = staggered_shifts([kind[0] for kind in sequence], group, work)
        for kind, shift in zip(sequence, shifts, strict=True):
            turns[kind].append(shift % len(refreshes))
    for kind, owner in owners.items():
        (shape, dtype, sharded), batch = kind, batches[kind]
        owned = np.bincount(owner, minlength=layout.size)
        costs.blocks[:] += owned
        costs.state[:] += owned * (state_bytes(batch.saved()) // len(batch.rows))
        turns[kind] = turns[kind] or [0] * len(owner)
        flops[kind] = 0.0
        if batch.refreshes or work == "polar":
            flops[kind] = refresh_cost(shape, group, work) / group["every"]
        np.add.at(added, (np.array(turns[kind]), owner), flops[kind])
        if sharded:
            weights = added_decay(group, "l2") or added_decay(group, "momentum")
            there = (layout.communication or dtype).itemsize * (2 if weights else 1)
            back = (layout.communication or batch.dtype).itemsize
            costs.sent[:] += back * prod(shape) * owned
            costs.sent[:] += _sent_to_owners(parts[kind], owner, there, back)
    refreshes += added
    queues = {
        kind: iter(list(zip(owner, turns[kind], strict=True))) for kind, owner in owners.items()
    }
    waves = []
    for wave in waves_of(rows, group, by_layer, work):
        waves.append(list[BatchWork]())
        for batch_rows in wave:
            kind = _kind(batch_rows[0], layout)
            owner, turn = np.array(list(islice(queues[kind], len(batch_rows)))).T
            waves[-1].append(BatchWork(owner, turn, flops[kind]))
            if not kind[2]:
                size = (layout.communication or batches[kind].dtype).itemsize * prod(kind[0])
                costs.sent[:] += directions_traffic(owner.tolist(), size, layout.size)
    delayed = refresh_delay(group) > 0  # on a thread: no step waits for them
    spans += added.max(1) if delayed else span(waves, *added.shape)


def _sent_to_owners(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], owner: np.ndarray, there: int, back: int
) -> np.ndarray:
    """`there` bytes an element, less `there` + `back` where a rank owns what it holds. [R]"""
    sent = np.zeros_like(parts[0][1][0])
    for index, elements in parts:
        sent += there * (np.bincount(index) @ elements)
        part_owner, owner = owner[: len(index)], owner[len(index) :]
        np.subtract.at(sent, part_owner, (there + back) * elements[index, part_owner])
    return sent


def _kind(row: BatchRow, layout: RankLayout) -> Kind:
    return row.block.shape, row.param.dtype, layout.is_sharded(row.param)


def _cut(sample: GroupLayout, layout: RankLayout) -> dict[Any, dict[Kind, Any]]:
    """The blocks of a parameter by its form and their kind: rows, and which ranks have them."""
    cut: dict[Any, dict[Kind, Any]] = {}
    for row in sorted((r for b in sample.batches for r in b.rows), key=lambda r: r.number):
        cut.setdefault(_form(row.param), {}).setdefault(_kind(row, layout), []).append(row)
    for kinds in cut.values():
        kinds.update({kind: (rows, _held(rows, layout)) for kind, rows in kinds.items()})
    return cut


def _held(rows: Sequence[BatchRow], layout: RankLayout) -> tuple[np.ndarray, np.ndarray]:
    """Rank r has elements[index[i], r] elements of the i-th of equal blocks, if sharded."""
    shape = rows[0].param.shape
    numbers: dict[tuple[int, int], int] = {}
    index, elements = list[int](), list[np.ndarray]()
    for block in (row.block for row in rows if layout.is_sharded(row.param)):
        # dimension 0 leads the first axis: blocks that differ along others are held alike
        axis = next((i for i, size in enumerate(block.merged) if size != 1), 0)
        index.append(numbers.setdefault((block.part, block.cut[axis].start), len(numbers)))
        if index[-1] == len(elements):
            held = np.zeros(layout.size, dtype=np.int64)
            for part in block_parts(block, shape, row_shards(shape[0], layout.size)):
                held[part.rank] = prod(part.shape)
            elements.append(held)
    return np.array(index), np.array(elements)


def _add_elements(
    costs: RankCosts, params: Sequence[Tensor], sample: GroupLayout, layout: RankLayout
) -> None:
    """Add AdamW's moments of the parts that ranks step, and averages of what they hold."""
    moments = {_form(p): x.row(i) for x in sample.adamw for i, p in enumerate(x.params)}
    means = sample.averages
    averages = {_form(p): means.entry(i) for i, p in enumerate(means.params)} if means else {}
    for param in params:
        form, numel = _form(param), param.numel()
        parts = _part_sizes(param.shape, layout.size)
        if form in moments:
            costs.state[:] += state_bytes(moments[form]) * parts // numel
            if layout.kind == "ddp" and param.ndim:
                size = padded_part(param.shape, layout.size) * param.itemsize
                costs.sent[:] += sent_by_gather(size, layout.size)
        for key, value in averages.get(form, {}).items():
            divided = key != "average_weight" and layout.is_sharded(param)
            costs.state[:] += value.nbytes // numel * parts if divided else value.nbytes


@lru_cache(maxsize=256)
def _part_sizes(shape: torch.Size, ranks: int) -> np.ndarray:
    """Elements of each rank's part of a parameter; all have a scalar. [R]"""
    bounds = chunk_bounds(shape[0], ranks) if shape else range(ranks + 1)
    return np.diff(bounds) * prod(shape[1:])


class Speed(NamedTuple):
    """Flops a second of matrix products and of eigendecompositions, and where they are from."""

    products: float
    decompositions: float
    source: str = "as given"


def measured_speed(side: int = 256, count: int = 4) -> Speed:
    """Speed of this machine on float32 matrices, in about a second."""
    x = torch.randn(count, side, side, generator=torch.Generator().manual_seed(0))
    values = {"x": x, "gram": x @ x.mT, "eigh": torch.linalg.eigh}
    rates = []
    for code, flops in (("gram @ x", 2.0), ("eigh(gram)", EIGEN_FLOPS)):
        timer = Timer(code, globals=values, num_threads=torch.get_num_threads())
        rates.append(count * flops * side**3 / timer.blocked_autorange(min_run_time=0.4).median)
    return Speed(rates[0], rates[1], f"measured here on {side}×{side} in float32")


def report(
    model: nn.Module, optimizers: Mapping[str, Any], layout: RankLayout, speed: Speed
) -> dict[str, Any]:
    """Plans of named optimizers, after AdamW with all of its state on every rank, as JSON."""
    adamw = plan(AdamW(param_groups(model)), RankLayout("ddp", 1))
    planned = {"adamw, on every rank": adamw}
    for spec, optimizer in optimizers.items():
        planned["adamw, sharded" if spec == "adamw" else spec] = plan(optimizer, layout)
    rows = []
    for spec, costs in planned.items():
        row: dict[str, Any] = {"optimizer": spec}
        refresh = costs.decompositions / speed.decompositions + costs.products / speed.products
        for key, values in (("state", costs.state), ("sent", costs.sent)):
            row |= {f"{key}_mean": values.mean().item(), f"{key}_worst": values.max().item()}
        path = costs.decomposition_span / speed.decompositions
        path += costs.product_span / speed.products
        row["compute"] = refresh.sum(0).mean().item()
        row["delay"] = path.sum().item()
        row["of_adamw"] = row["state_worst"] / adamw.state.max().item()
        row["owners"] = int(np.count_nonzero(costs.blocks)) * (layout.ranks // layout.size)
        rows.append(row)
    params = list(model.parameters())
    names = [str(dtype).removeprefix("torch.") for dtype in (params[0].dtype, layout.communication)]
    return {
        "parameters": sum(param.numel() for param in params),
        "tensors": len(params),
        "dtype": names[0],
        "layout": layout.kind,
        "ranks": layout.ranks,
        "shard": layout.size,
        "communication": names[1] if layout.communication else None,
        "product_flops": speed.products,
        "eigh_flops": speed.decompositions,
        "speed": speed.source,
        "optimizers": finite(rows),
    }
