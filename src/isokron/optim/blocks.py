"""How a parameter of any shape becomes blocks, and how equal blocks become one batch."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isokron.block_layout import Block, cut_blocks, is_matrix, split_sizes
from isokron.linalg import sent

if TYPE_CHECKING:
    from isokron.optim.shared import Shared

__all__ = [
    "Batch",
    "Block",
    "Observed",
    "Row",
    "Tile",
    "cut_blocks",
    "is_matrix",
    "split_sizes",
    "tiles_of",
]

SMALL = 1 << 12  # elements, of which finding a tensor takes longer than copying it


@dataclass(frozen=True)
class Row:
    """One row of a batch: the `number`-th block of a parameter."""

    param: Tensor
    block: Block
    number: int


@dataclass(frozen=True)
class Tile:
    """Rows of a batch that are neighbours in their parameter, read and written as one tensor.

    `first`: of the rows. `block`: what they cover. `counts`: how many there are along each
    dimension.
    """

    param: Tensor
    first: int
    block: Block
    counts: tuple[int, ...]

    @cached_property
    def rows(self) -> range:
        return range(self.first, self.first + prod(self.counts))

    @cached_property
    def whole(self) -> bool:
        """Whether it is one block, which is the parameter as it stands."""
        block, shape = self.block, tuple(self.param.shape)
        return prod(self.counts) == 1 and not block.index and shape == block.merged == block.shape

    def cells(self, covered: Tensor) -> Tensor:
        """What the block covers, as its rows. [*counts, ...]; of one row: [...]"""
        if len(self.rows) == 1:
            return covered
        sizes = [size // n for size, n in zip(covered.shape, self.counts, strict=True)]
        pairs = zip(self.counts, sizes, strict=True)
        axes = range(2 * covered.ndim)
        return covered.view(*chain.from_iterable(pairs)).permute(*axes[::2], *axes[1::2])

    def read(self, tensor: Tensor) -> Tensor:
        """Of a tensor like the parameter, copied only where it must be. [B, ...]"""
        cells = self.cells(self.block.read(tensor))
        return cells.reshape(-1, *cells.shape[len(self.counts) if len(self.rows) > 1 else 0 :])


def tiles_of(rows: Sequence[Row]) -> list[Tile]:
    """Rows, in their order, as few tiles."""
    tiles: list[Tile] = []
    first = 0
    for _, several in groupby(rows, lambda row: (id(row.param), row.block.part)):
        found = [Tile(row.param, 0, row.block, (1,) * len(row.block.merged)) for row in several]
        for axis in reversed(range(len(found[0].counts))):
            joined = found[:1]
            for tile in found[1:]:
                joined[-1:] = _joined(joined[-1], tile, axis)
            found = joined
        for tile in found:
            tiles.append(replace(tile, first=first))
            first += len(tile.rows)
    return tiles


def _joined(one: Tile, next_: Tile, axis: int) -> list[Tile]:
    """Both as one where they are neighbours along an axis and alike along the others."""
    cut, more = list(one.block.cut), list(next_.block.cut)
    each = (cut[axis].stop - cut[axis].start) // one.counts[axis]
    span = slice(cut[axis].start, more[axis].stop)
    counts = list(one.counts)
    adjoins = cut[axis].stop == more[axis].start and each * next_.counts[axis] == (
        more[axis].stop - more[axis].start
    )
    counts[axis] += next_.counts[axis]
    cut[axis] = more[axis] = span
    alike = all(i == axis or n == next_.counts[i] for i, n in enumerate(counts))
    if not (adjoins and alike and cut == more):
        return [one, next_]
    block = Block(one.block.part, one.block.index, one.block.merged, tuple(cut))
    return [Tile(one.param, one.first, block, tuple(counts))]


class Batch:
    """Equal blocks of one group, worked on as one tensor [B, ...].

    Its rows are fixed when it is built: a missing gradient leaves a row out of a step and never
    shifts the others. `step` counts, per row, the gradients it has seen, `phase` says by how many
    steps its refreshes are shifted, `failures` how many have failed in a row, `refreshed` whether
    one has ever made an operator; they stay on the CPU so that asking what is due never waits for a
    device. `coming`: operators whose refresh has begun and does not count yet, under the names they
    have in `state`; `jobs`: who is at work on them.
    `shared`: where other processes have rows of this batch too, all of them; `rows` are then those
    owned here, perhaps none.
    """

    def __init__(self, rows: list[Row], dtype: torch.dtype, shared: "Shared | None" = None) -> None:
        self.rows, self.shared = rows, shared
        some = rows[0] if shared is None else shared.rows[0]
        self.shape = some.block.shape
        self.device = some.param.device
        self.dtype = dtype
        self.step = torch.zeros(len(rows), dtype=torch.float32, device="cpu")
        self.phase = torch.zeros(len(rows), dtype=torch.int64, device="cpu")
        self.failures = torch.zeros(len(rows), dtype=torch.int64, device="cpu")
        self.refreshed = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        self.state: dict[str, Tensor] = {}
        self.coming: dict[str, Tensor] = {}
        self.jobs: dict[int, Future[dict[int, Tensor]]] = {}

    @cached_property
    def tiles(self) -> list[Tile]:
        return tiles_of(self.rows)

    @cached_property
    def small(self) -> bool:
        """Whether its rows are many whole parameters of few elements and its dtype: finding each
        takes longer than working on it."""
        tiles = self.tiles if self.shared is None and prod(self.shape) <= SMALL else []
        whole = all(tile.whole and tile.param.dtype is self.dtype for tile in tiles)
        return len(tiles) > 1 and whole

    @cached_property
    def _all(self) -> Tensor:
        return torch.arange(len(self.rows), device="cpu")

    def numbers(self, tiles: Sequence[Tile]) -> Tensor:
        """Of the rows of tiles, on the CPU. [B]"""
        if len(tiles) == len(self.tiles):
            return self._all
        return torch.tensor([row for tile in tiles for row in tile.rows], device="cpu")

    def index(self, rows: Sequence[int]) -> Tensor:
        """Numbers of rows as an index on the batch's device, sent there without waiting for it."""
        return sent(torch.tensor(rows, device="cpu"), self.device)

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.rows), *self.shape, dtype=self.dtype, device=self.device)

    def _none(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def eyes(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """An identity matrix a row. [B, size, size]"""
        eye = torch.eye(size, dtype=dtype or self.dtype, device=self.device)
        return eye.repeat(len(self.rows), 1, 1)

    def stored(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of the rows, `step` aside."""
        return {**self.state, **{f"next.{key}": value for key, value in self.coming.items()}}

    def _stack(self, tensors: Sequence[Tensor], tiles: Sequence[Tile]) -> Tensor:
        """The rows of tiles, read from tensors like their parameters, in the batch's dtype."""
        if self.small:
            return torch.stack(list(tensors)).to(self.dtype)
        read = [tile.read(tensor) for tile, tensor in zip(tiles, tensors, strict=True)]
        return (read[0] if len(read) == 1 else torch.cat(read)).to(self.dtype)

    def gradients(self, tiles: Sequence[Tile]) -> Tensor:
        """Of tiles that have one. [B, ...]"""
        if self.shared is not None:
            return self.shared.arrived("grad", self._none())
        grads = [grad for tile in tiles if (grad := tile.param.grad) is not None]
        return self._stack(grads, tiles)

    def weights(self, tiles: Sequence[Tile]) -> Tensor:
        """[B, ...]"""
        if self.shared is not None:
            return self.shared.arrived("weight", self._none())
        return self._stack([tile.param for tile in tiles], tiles)

    def turns(self, numbers: Tensor) -> Tensor:
        """Of these rows: the gradients they have seen, less their phase. [B]"""
        turns = self.step - self.phase
        return turns if numbers is self._all else turns[numbers]

    def rows_of(self, tiles: Sequence[Tile]) -> list[Row]:
        return [self.rows[i] for tile in tiles for i in tile.rows]

    def present(self) -> list[Tile]:
        """Tiles whose parameter has a gradient in this step."""
        return [tile for tile in self.tiles if tile.param.grad is not None]

    def select(self, rows: Tensor | None) -> dict[str, Tensor]:
        """The state of some rows (copies), or of all (the state itself)."""
        if rows is None:
            return dict(self.state)
        return {key: value[rows] for key, value in self.state.items()}

    def put_(self, state: dict[str, Tensor], rows: Tensor | None) -> None:
        """Write back what `select` gave and a step has changed."""
        for key, value in self.state.items():
            if rows is not None:
                value[rows] = state[key]
            elif state[key] is not value:
                value.copy_(state[key])


@dataclass
class Observed:
    """A batch whose gradients have been observed, or that has none here (`grad` None).

    `tiles`: those that step; `numbers`: of their rows; `at`: the same as an index, None for all.
    """

    batch: Batch
    tiles: list[Tile] = field(default_factory=list)
    numbers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    at: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    grad: Tensor | None = None  # [B, ...]
