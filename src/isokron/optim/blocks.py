"""Equal blocks of parameters as one batch: how they are read, and how steps are written.

Blocks that are neighbours in their parameter are read and written as one strided view, so that the
cost of a step in Python does not grow with the number of blocks.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from isokron.block_layout import Block
from isokron.distributed import Arriving, BlockExchange, local
from isokron.linalg import sent
from isokron.optim.quantization import (
    dequantize,
    dequantize_symmetric,
    quantize,
    quantize_symmetric,
    stochastic_bfloat16,
)
from isokron.optim.settings import decay_rate, learning_rate

# Elements below which looking up a tensor takes longer than copying it.
SMALL = 1 << 12

# (parameter, number of its part) → the part and a copy of it that blocks can be viewed in
Copies = dict[tuple[Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch: the `number`-th block of a parameter."""

    param: Tensor
    block: Block
    number: int


@dataclass(frozen=True)
class BlockView:
    """Rows of a batch that are neighbours in their parameter, read and written as one tensor.

    Args:
        param: the parameter.
        first: the number of its first row.
        block: what all of the rows cover.
        counts: how many rows there are along each dimension.
    """

    param: Tensor
    first: int
    block: Block
    counts: tuple[int, ...]

    @cached_property
    def rows(self) -> range:
        return range(self.first, self.first + prod(self.counts))

    @cached_property
    def is_param(self) -> bool:
        """Whether it is one block which is the parameter as it stands."""
        block, shape = self.block, tuple(self.param.shape)
        return prod(self.counts) == 1 and not block.index and shape == block.merged == block.shape

    def split(self, tensor: Tensor) -> Tensor:
        """View a tensor of the block's shape as its rows: [*counts, ...], or [...] if it is one."""
        if len(self.rows) == 1:
            return tensor
        sizes = [size // n for size, n in zip(tensor.shape, self.counts, strict=True)]
        pairs = zip(self.counts, sizes, strict=True)
        axes = range(2 * tensor.ndim)
        return tensor.view(*chain.from_iterable(pairs)).permute(*axes[::2], *axes[1::2])

    def read(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor like the parameter, copied only where they must be. [B, ...]"""
        block = self.block
        rows = self.split(tensor[block.index].reshape(block.merged)[block.cut])
        return rows.reshape(-1, *rows.shape[len(self.counts) if len(self.rows) > 1 else 0 :])

    def writable(self, copies: Copies) -> Tensor:
        """The rows as a view of the parameter, or of a copy that `write_back` writes."""
        if self.is_param and type(self.param) is nn.Parameter:
            return self.param
        return self.split(writable(self.param, self.block, copies))


def writable(param: Tensor, block: Block, copies: Copies) -> Tensor:
    """A block of a parameter, or of a copy kept for the step where it has no view."""
    tensor = param if type(param) is nn.Parameter else local(param)
    try:
        return tensor[block.index].view(block.merged)[block.cut]
    except RuntimeError:  # strides that do not merge, such as channels_last
        part = tensor[block.index]
        _, copy = copies.setdefault((param, block.part), (part, part.reshape(block.merged)))
        return copy[block.cut]


def write_back(copies: Copies) -> None:
    """Write the parameters whose blocks were written in copies."""
    for part, copy in copies.values():
        part.copy_(copy.view(part.shape))


def views_of(rows: Sequence[BatchRow]) -> list[BlockView]:
    """Rows, in their order, as few views."""
    views: list[BlockView] = []
    first = 0
    for _, of_part in groupby(rows, lambda row: (id(row.param), row.block.part)):
        merged = [BlockView(row.param, 0, row.block, (1,) * len(row.block.cut)) for row in of_part]
        # neighbours along the last dimension follow each other, so it is joined first
        for axis in reversed(range(len(merged[0].counts))):
            joined = merged[:1]
            for view in merged[1:]:
                joined[-1:] = _joined(joined[-1], view, axis)
            merged = joined
        for view in merged:
            views.append(replace(view, first=first))
            first += len(view.rows)
    return views


def _joined(one: BlockView, following: BlockView, axis: int) -> list[BlockView]:
    """Both views as one if they are neighbours along an axis and equal along the others."""
    cut, next_cut = list(one.block.cut), list(following.block.cut)
    length = (cut[axis].stop - cut[axis].start) // one.counts[axis]
    span = slice(cut[axis].start, next_cut[axis].stop)
    counts = list(one.counts)
    adjoins = cut[axis].stop == next_cut[axis].start and length * following.counts[axis] == (
        next_cut[axis].stop - next_cut[axis].start
    )
    counts[axis] += following.counts[axis]
    cut[axis] = next_cut[axis] = span
    alike = all(i == axis or n == following.counts[i] for i, n in enumerate(counts))
    if not (adjoins and alike and cut == next_cut):
        return [one, following]
    block = Block(one.block.part, one.block.index, one.block.merged, tuple(cut))
    return [BlockView(one.param, one.first, block, tuple(counts))]


class Batch:
    """Equal blocks of one group, worked on as one tensor [B, ...].

    Its rows are fixed: a missing gradient leaves a row out of a step and never shifts the others.
    Counters stay on the CPU, so that asking what is due never waits for a device.

    Args:
        rows: the blocks that this process owns, perhaps none.
        dtype: of the state.
        shape: of a block.
        device: of the blocks.
        exchange: all blocks of the batch, where other processes own some of them.
    """

    def __init__(
        self,
        rows: list[BatchRow],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        exchange: BlockExchange | None = None,
    ) -> None:
        self.rows, self.exchange = rows, exchange
        self.shape, self.device, self.dtype = shape, device, dtype
        count = len(rows)
        # gradients seen; float32 would count no further than 2²⁴
        self.step = torch.zeros(count, dtype=torch.float64, device="cpu")
        # staggered refreshes: after step `together` those of a row come so many steps earlier
        self.shift = torch.zeros(count, dtype=torch.int64, device="cpu")
        self.together = 0
        self.failures = torch.zeros(count, dtype=torch.int64, device="cpu")  # refreshes, in a row
        self.refreshes = False  # whether there is an operator to refresh
        self.refresh_count = self.failure_count = 0  # of all rows, since the batch was made
        # 1 where a refresh has ever made an operator; saved with the state
        self.refreshed = torch.zeros(count, dtype=torch.float32, device="cpu")
        self.state: dict[str, Tensor] = {}
        # how state is stored in fewer bytes: "signed" or "unsigned" codes of 8 bits, "symmetric"
        # matrices as a triangle in codes of 16 bits, or in "bfloat16"
        self.formats: dict[str, str] = {}
        # of the rows in a step, by names in `formats`: tensors, and versions that tell of changes
        self.decoded: dict[str, tuple[Tensor, int]] = {}
        # operators whose refresh has begun and does not count yet, by their names in `state`
        self.coming: dict[str, Tensor] = {}
        self.jobs: dict[int, Future[dict[int, Tensor]]] = {}  # by row: the refreshes under way
        self.pending: set[int] = set()  # rows whose refresh was under way in a loaded checkpoint

    @cached_property
    def views(self) -> list[BlockView]:
        return views_of(self.rows)

    @cached_property
    def is_small(self) -> bool:
        """Whether its rows are many whole parameters of few elements, in the batch's dtype."""
        views = self.views if self.exchange is None and prod(self.shape) <= SMALL else []
        return len(views) > 1 and all(v.is_param and v.param.dtype is self.dtype for v in views)

    @cached_property
    def all_rows(self) -> Tensor:
        return torch.arange(len(self.rows), device="cpu")

    def present(self) -> list[BlockView]:
        """The views whose parameter has a gradient in this step."""
        return [view for view in self.views if view.param.grad is not None]

    def row_numbers(self, views: Sequence[BlockView]) -> Tensor:
        """The numbers of the rows of views, on the CPU. [B]"""
        if len(views) == len(self.views):
            return self.all_rows
        return torch.tensor([row for view in views for row in view.rows], device="cpu")

    def index(self, rows: Sequence[int]) -> Tensor:
        """Numbers of rows as an index on the batch's device."""
        return sent(torch.tensor(rows, device="cpu"), self.device)

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.rows), *self.shape, dtype=self.dtype, device=self.device)

    def eyes(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """An identity matrix a row. [B, size, size]"""
        eye = torch.eye(size, dtype=dtype or self.dtype, device=self.device)
        return eye.repeat(len(self.rows), 1, 1)

    def gradients(self, views: Sequence[BlockView]) -> Tensor:
        """The gradients of views that have one. [B, ...]"""
        if self.exchange is not None:
            return self.exchange.take("grad", self.dtype, self.device)
        return self._stack([v.param.grad for v in views if v.param.grad is not None], views)

    def weights(self, views: Sequence[BlockView]) -> Tensor:
        """[B, ...]"""
        if self.exchange is not None:
            return self.exchange.take("weight", self.dtype, self.device)
        return self._stack([view.param for view in views], views)

    def _stack(self, tensors: Sequence[Tensor], views: Sequence[BlockView]) -> Tensor:
        """The rows of views of tensors like their parameters, in the batch's dtype."""
        if self.is_small:
            return torch.stack(list(tensors)).to(self.dtype)
        rows = [view.read(tensor) for view, tensor in zip(views, tensors, strict=True)]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(self.dtype)

    def compress_(self, formats: Mapping[str, str]) -> None:
        """Store entries of the state in fewer bytes from now on."""
        self.formats = dict(formats)
        for key, form in formats.items():
            self.state |= _encoded(key, self.state[key], form, self.step)

    def read_state(
        self, index: Tensor | None, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """The state of rows, or of all, to work on; it shares memory where it can.

        `names`: only these entries, of which nothing is kept to be written back.
        """
        state = dict(self.state)
        formats = self.formats
        if names is not None:
            formats = {key: form for key, form in formats.items() if key in names}
            scales = {f"scale.{key}" for key in formats}
            state = {key: v for key, v in state.items() if key in names or key in scales}
        if index is not None:
            state = {key: value[index] for key, value in state.items()}
        for key, form in formats.items():
            if form == "bfloat16":
                state[key] = state[key].to(self.dtype)
            else:
                decode = dequantize_symmetric if form == "symmetric" else dequantize
                state[key] = decode(state[key], state.pop(f"scale.{key}"), self.dtype)
        if names is None:
            self.decoded = {key: (state[key], state[key]._version) for key in formats}
        return state

    def turns(self, rows: Tensor) -> Tensor:
        """The steps by which refreshes of rows are due: the gradients seen, shifted. [B]"""
        turns = self.step + self.shift * (self.step > self.together)
        return turns if rows is self.all_rows else turns[rows]

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint has of every row beside `step`: tensors [B, ...]."""
        coming = {f"next.{key}": value for key, value in self.coming.items()}
        refreshed = {"refreshed": self.refreshed} if self.refreshes else {}
        return {**self.state, **refreshed, **coming}


@dataclass
class BatchStep:
    """A batch in a step: the rows that have gradients, their state, and what becomes of them.

    `views` is empty where other processes own all blocks that step. `rows`: numbers of the rows;
    `index`: the same on the device, None for all rows. `state`: of these rows.
    """

    batch: Batch
    views: list[BlockView] = field(default_factory=list)
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    index: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    grad: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))  # [B, ...]
    direction: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))  # [B, ...]
    arriving: Arriving | None = None

    @property
    def batch_rows(self) -> list[BatchRow]:
        return [self.batch.rows[i] for view in self.views for i in view.rows]

    def store_state_(self) -> None:
        """Write the state of the rows that stepped back to the batch."""
        batch, state = self.batch, dict(self.state)
        for key, form in batch.formats.items():
            value = state.pop(key)
            read, version = batch.decoded.pop(key)
            if value is not read or value._version != version:  # most steps change no operator
                state |= _encoded(key, value, form, batch.step[self.rows])
        for key, stored in batch.state.items():
            value = state.get(key, stored)
            if value is not stored and self.index is not None:
                stored[self.index] = value
            elif value is not stored:
                stored.copy_(value)

    def write_(self, group: Mapping[str, Any], copies: Copies) -> None:
        """W ← W(1 − lr·λ) − lr·P"""
        lr, decay = learning_rate(group), decay_rate(group, "momentum")
        batch, stochastic = self.batch, group["rounding"] == "stochastic"
        if batch.exchange is not None and self.arriving is not None:
            blocks = [writable(param, block, copies) for param, block in batch.exchange.targets()]
            seed = batch.exchange.step.max() if stochastic else None
            _descend_(blocks, self.arriving.take(), lr, decay, seed)
        elif batch.is_small and not stochastic:
            weights = batch.weights(self.views)
            _descend_([weights], [self.direction], lr, decay)
            torch._foreach_copy_([view.param for view in self.views], list(weights.unbind()))
        else:
            blocks = [view.writable(copies) for view in self.views]
            seed = batch.step.max() if stochastic else None
            _descend_(blocks, self.directions_of_views(), lr, decay, seed)

    def directions_of_views(self) -> list[Tensor]:
        if len(self.views) == len(self.direction):
            return list(self.direction.unbind())
        parts = self.direction.split([len(view.rows) for view in self.views])
        return [
            part.view(*view.counts, *part.shape[1:]) if len(view.rows) > 1 else part[0]
            for view, part in zip(self.views, parts, strict=True)
        ]


def _encoded(key: str, value: Tensor, form: str, steps: Tensor) -> dict[str, Tensor]:
    """An entry of the state as it is stored; `steps`: of its rows, on the CPU. [B]"""
    if form == "bfloat16":
        return {key: stochastic_bfloat16(value, steps)}
    if form == "symmetric":
        codes, scale = quantize_symmetric(value, steps)
    else:
        codes, scale = quantize(value, form == "signed")
    return {key: codes, f"scale.{key}": scale}


def _descend_(
    blocks: list[Tensor], directions: list[Tensor], lr: Any, decay: Any, seed: Tensor | None = None
) -> None:
    """B ← B(1 − lr·λ) − lr·P; bfloat16 is rounded stochastically if there is a seed."""
    if not blocks:
        return
    if seed is not None and blocks[0].dtype is torch.bfloat16:
        wide = [block.float() for block in blocks]
        _descend_(wide, directions, lr, decay)
        for block, value in zip(blocks, wide, strict=True):
            block.copy_(stochastic_bfloat16(value, seed.view(1)))
        return
    if decay:
        torch._foreach_mul_(blocks, 1 - lr * decay)
    if isinstance(lr, Tensor):
        directions, lr = list(torch._foreach_mul(directions, lr)), 1.0
    torch._foreach_sub_(blocks, directions, alpha=lr)
