"""How a parameter of any shape is cut into blocks, in plain numbers, for torch and JAX."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Block:
    """One block of a parameter: index it, view the part as `merged`, cut that.

    `part`: which part of the parameter this is; blocks of one part have the same index.
    """

    part: int
    index: Index
    merged: tuple[int, ...]
    cut: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            len(range(size)[piece]) for size, piece in zip(self.merged, self.cut, strict=True)
        )

    def view(self, tensor: Any) -> Any:
        """The block as a view of `tensor`; RuntimeError where its strides do not allow one."""
        return tensor[self.index].view(self.merged)[self.cut]

    def read(self, tensor: Any) -> Any:
        """The block, copied only where the strides of `tensor` force it."""
        return tensor[self.index].reshape(self.merged)[self.cut]


class Part(NamedTuple):
    """A part of a matrix: narrow it to this, and view what is then of `shape` as `merged`."""

    narrow: tuple[slice, ...]
    shape: tuple[int, ...]
    merged: tuple[int, ...]


class Grid(NamedTuple):
    """Equal blocks side by side: so many along each dimension, from `start` on."""

    start: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]


def is_matrix(shape: Sequence[int], stacked: int = 0) -> bool:
    """Whether, past the stacking dimensions, more than one dimension is left."""
    return sum(size != 1 for size in shape[stacked:]) >= 2


def merge_dims(
    shape: Sequence[int], max_dim: int | None = None, order: int | None = None
) -> tuple[int, ...]:
    """Drop ones and merge small neighbours, from the last backwards, while ≤ `max_dim`.

    A matrix never becomes a vector. `order` = 2: a matrix of the first or of the last dimension and
    all others, whichever is squarer, so that convolutions are [out, in·h·w], and [h·w·in, out] in
    JAX. (256, 128, 3, 3) is (256, 128, 9) at max_dim 1024, (256, 1152) at order 2.
    """
    dims = [size for size in shape if size != 1]
    if order == 2 and len(dims) > 2:
        first, last, size = dims[0], dims[-1], prod(dims)
        by_first, by_last = (first, size // first), (size // last, last)
        return min(by_first, by_last, key=lambda matrix: max(matrix) / min(matrix))
    merged: list[int] = []
    while dims:
        size = dims.pop()
        dims_left = len(dims) + len(merged) + 1
        fits = max_dim is not None and bool(merged) and size * merged[0] <= max_dim
        if fits and dims_left > 2:
            merged[0] *= size
        else:
            merged.insert(0, size)
    return tuple(merged)


def cut_blocks(
    shape: Sequence[int],
    *,
    max_dim: int | None = None,
    order: int | None = None,
    stacked: int = 0,
    split: Sequence[int] | int | None = None,
    split_dim: int = 0,
) -> list[Block]:
    """All blocks of a parameter of this shape.

    Args:
        shape: of the parameter.
        max_dim: longer dimensions are cut into blocks of at most this size, see cut_lengths.
        order: as in merge_dims.
        stacked: how many leading dimensions count matrices ([experts, m, n] has stacked=1).
        split: sizes (or a number of equal parts) of a fused projection along `split_dim` of one
            matrix, so that query, key and value are blocks of their own.
        split_dim: the dimension of one matrix along which `split` cuts.
    """
    inner = tuple(shape[stacked:])
    parts = cut_parts(inner, max_dim=max_dim, order=order, split=split, split_dim=split_dim)
    numbers = itertools.count()
    blocks = []
    for lead in itertools.product(*map(range, shape[:stacked])):
        for part in parts:
            cuts = itertools.product(*map(_pieces, part.merged, cut_lengths(part.merged, max_dim)))
            number = next(numbers)
            blocks += [Block(number, (*lead, *part.narrow), part.merged, cut) for cut in cuts]
    return blocks


def cut_parts(
    shape: Sequence[int],
    *,
    max_dim: int | None = None,
    order: int | None = None,
    split: Sequence[int] | int | None = None,
    split_dim: int = 0,
) -> list[Part]:
    """The parts of one matrix, past the stacking dimensions; without `split`, one."""
    lengths = split_sizes(shape, split, split_dim)
    parts = []
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        narrow: tuple[slice, ...] = ()
        part = tuple(shape)
        if split is not None:
            narrow = (slice(None),) * split_dim + (slice(start, start + length),)
            part = (*shape[:split_dim], length, *shape[split_dim + 1 :])
        merged = merge_dims(part, max_dim, order)
        if is_matrix(shape):  # a part of one row is a matrix of one row
            merged = (1,) * (2 - len(merged)) + merged
        parts.append(Part(narrow, part, merged))
    return parts


def cut_lengths(sizes: Sequence[int], max_dim: int | None) -> tuple[int, ...]:
    """The length of blocks along each dimension: equal ones of at most `max_dim` where possible.

    Equal blocks are one batch, and a block of a few rows that is left over is hardly
    preconditioned. 576 is cut into 3 times 192 at max_dim 256, and 1152 into 6 times 192.
    """
    lengths = []
    for size in sizes:
        count = 1 if max_dim is None else -(-size // max_dim)
        counts = range(count, count + max(1, count // 4) + 1)
        equal = next((n for n in counts if size % n == 0), None)
        # for kernels that work on 8 or 16 elements at once
        even = min(max_dim or size, -(-size // count // 8) * 8)
        lengths.append(even if equal is None else size // equal)
    return tuple(lengths)


def cut_grids(merged: Sequence[int], lengths: Sequence[int | None]) -> list[Grid]:
    """All blocks of a part as grids of equal blocks; `lengths`: the block size of each dimension.

    Along each dimension the full blocks come first, then the remainder; the last dimension varies
    fastest.
    """
    grids = []
    sides = zip(merged, lengths, strict=True)
    for runs in itertools.product(*(_runs(size, length) for size, length in sides)):
        start, counts, shape = zip(*runs, strict=True) if runs else ((), (), ())
        grids.append(Grid(start, counts, shape))
    return grids


def split_sizes(shape: Sequence[int], split: Sequence[int] | int | None, dim: int) -> list[int]:
    """The lengths of the parts along `dim`, checked against the shape."""
    if split is None:
        return [shape[dim] if shape else 1]
    if dim >= len(shape):
        raise ValueError(f"split_dim {dim} is not a dimension of shape {tuple(shape)}")
    if isinstance(split, int):
        if split < 1 or shape[dim] % split:
            raise ValueError(
                f"split={split} must divide dimension {dim} of shape {tuple(shape)}; "
                "give the sizes of the parts instead"
            )
        return [shape[dim] // split] * split
    if sum(split) != shape[dim] or min(split, default=0) < 1:
        raise ValueError(
            f"split={tuple(split)} must be positive sizes that sum to {shape[dim]}, "
            f"dimension {dim} of shape {tuple(shape)}"
        )
    return list(split)


def _pieces(size: int, length: int) -> list[slice]:
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]


def _runs(size: int, length: int | None) -> list[tuple[int, int, int]]:
    """(start, how many, their size) of the full blocks, and of the remainder."""
    if length is None or size <= length:
        return [(0, 1, size)]
    full, remainder = divmod(size, length)
    return [(0, full, length), *([(full * length, 1, remainder)] if remainder else [])]
