"""Which part of a block is on which rank, where a parameter is cut along one dimension.

A block is a parameter indexed, viewed as `merged` and cut (see isokron.block_layout). Dimensions
merge with those after them, so elements [lo, hi) of a dimension that leads its merged one are a
range of that: what a rank has of a block is the block narrowed along one axis, and it is a block of
the rank's own shard too.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isokron.block_layout import Block


@dataclass(frozen=True)
class Holder:
    """A rank that has elements `lo` to `hi` along `axis` of a block."""

    rank: int
    axis: int
    lo: int
    hi: int


@dataclass(frozen=True)
class _Lies:
    """How a block lies along a dimension of its parameter: elements `first` to `last` of it, each
    of which is `unit` elements along `axis` of the merged view; None where it is one element."""

    first: int
    last: int
    axis: int | None
    unit: int = 1


def holders(block: Block, shape: Sequence[int], dim: int, bounds: Sequence[int]) -> list[Holder]:
    """The ranks that have something of a block, each with what it has."""
    lies = _lies(block, shape, dim)
    begin, end = lies.first, lies.last
    if lies.axis is not None:  # of the dimension, what the block has elements of
        cut = block.cut[lies.axis]
        begin, end = begin + cut.start // lies.unit, begin - (-cut.stop // lies.unit)
    found = []
    for rank in range(max(0, bisect_right(bounds, begin) - 1), len(bounds) - 1):
        lo, hi = bounds[rank : rank + 2]
        if lo >= end:
            break
        first, last = max(lo, lies.first), min(hi, lies.last)
        if first >= last:
            continue
        if lies.axis is None:
            found.append(Holder(rank, 0, 0, block.shape[0]))
            continue
        cut = block.cut[lies.axis]
        start, stop = ((at - lies.first) * lies.unit for at in (first, last))
        start, stop = max(start, cut.start), min(stop, cut.stop)
        if start < stop:
            found.append(Holder(rank, lies.axis, start - cut.start, stop - cut.start))
    return found


def block_of_shard(block: Block, shape: Sequence[int], dim: int, lo: int, hi: int) -> Block | None:
    """The same elements as a block of the shard that is elements [lo, hi) of `dim`, if any."""
    lies = _lies(block, shape, dim)
    first, last = max(lo, lies.first), min(hi, lies.last)
    if first >= last:
        return None
    index = [*block.index, *[slice(None)] * (dim + 1 - len(block.index))]
    one = isinstance(index[dim], int)
    index[dim] = first - lo if one else slice(first - lo, last - lo)
    if lies.axis is None:
        return replace(block, index=tuple(index))
    merged, cut = list(block.merged), list(block.cut)
    own = cut[lies.axis]
    start, stop = ((at - lies.first) * lies.unit for at in (first, last))
    begin, end = max(start, own.start), min(stop, own.stop)
    if begin >= end:
        return None
    merged[lies.axis] = (last - first) * lies.unit
    cut[lies.axis] = slice(begin - start, end - start)
    return Block(block.part, tuple(index), tuple(merged), tuple(cut))


def _lies(block: Block, shape: Sequence[int], dim: int) -> _Lies:
    """See `_Lies`; a ValueError for a dimension that is merged into one before it."""
    at = block.index[dim] if dim < len(block.index) else slice(None)
    if isinstance(at, int):
        return _Lies(at, at + 1, None)
    lengths = []  # of all dimensions that the index leaves
    for i, size in enumerate(shape):
        piece = block.index[i] if i < len(block.index) else slice(None)
        if isinstance(piece, slice):
            lengths.append((i, len(range(size)[piece])))
    first, last, _ = at.indices(shape[dim])
    if last - first == 1:
        return _Lies(first, last, None)
    axis = next(i for i, size in enumerate(block.merged) if size != 1)
    left = block.merged[axis]
    for i, length in ((i, length) for i, length in lengths if length != 1):
        if left == 1:
            axis = next(j for j in range(axis + 1, len(block.merged)) if block.merged[j] != 1)
            left = block.merged[axis]
        if i == dim:
            if left != block.merged[axis]:
                raise ValueError(
                    f"a parameter of shape {tuple(shape)} is sharded along dimension {dim}, which "
                    f"its blocks merge with the one before; shard it along another, or give it a "
                    "group with a smaller max_dim"
                )
            return _Lies(first, last, axis, block.merged[axis] // length)
        left //= length
    raise AssertionError(f"dimension {dim} of {tuple(shape)} is not in {block}")
