"""Blocks of a batch on their way: from the ranks that hold their elements to their owners and back.

One collective a batch: an all-to-all where parameters are sharded; where every rank has the whole
parameter only directions travel, by an all-gather, or by broadcasts if most ranks own none of them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import torch
from torch import Tensor

from isokron.block_layout import Block
from isokron.distributed.dtensor import Place, ShardGrid, local
from isokron.distributed.process_group import Pending, sent_by_broadcast, sent_by_gather


@dataclass(frozen=True)
class BlockPart:
    """The part `cut` of a block, which `rank` has as the block `local` of its shard."""

    rank: int
    cut: tuple[slice, ...]
    local: Block
    shape: tuple[int, ...]


def block_parts(block: Block, shape: Sequence[int], shards: ShardGrid) -> list[BlockPart]:
    """The parts of a block of a parameter of this shape, one for every shard that overlaps it."""
    everything = tuple(slice(0, size) for size in block.shape)
    parts: list[tuple[tuple[int, ...], tuple[slice, ...], Block]] = [((), everything, block)]
    for dim, bounds in shards.cuts:
        parts = [
            ((*numbers, number), narrowed_cut, narrowed)
            for numbers, cut, part in parts
            for number, narrowed_cut, narrowed in _narrowed(part, cut, shape, dim, bounds)
        ]
    return [BlockPart(shards.ranks[key], cut, part, part.shape) for key, cut, part in parts]


def _narrowed(
    block: Block, cut: tuple[slice, ...], shape: Sequence[int], dim: int, bounds: Sequence[int]
) -> Iterator[tuple[int, tuple[slice, ...], Block]]:
    """A block, and the cut that it is, narrowed to each chunk along `dim` that overlaps it.

    Dimensions merge with those after them (isokron.block_layout), so a range of a dimension that
    leads its merged one is a range of that: each block is narrowed along one axis.
    """
    first, last, axis, unit = _span(block, shape, dim)
    begin, end = first, last
    along = slice(0, 1) if axis is None else block.cut[axis]
    if axis is not None:
        begin, end = first + along.start // unit, first - (-along.stop // unit)
    for number in range(max(0, bisect_right(bounds, begin) - 1), len(bounds) - 1):
        lo, hi = bounds[number : number + 2]
        if lo >= end:
            break
        start, stop = max(lo, first), min(hi, last)
        index = [*block.index, *[slice(None)] * (dim + 1 - len(block.index))]
        single = isinstance(index[dim], int)
        index[dim] = start - lo if single else slice(start - lo, stop - lo)
        if axis is None:
            yield number, cut, replace(block, index=tuple(index))
            continue
        offset = (start - first) * unit  # of this chunk along the merged axis
        low, high = max(offset, along.start), min((stop - first) * unit, along.stop)
        merged, local_cut, block_cut = list(block.merged), list(block.cut), list(cut)
        merged[axis] = (stop - start) * unit
        local_cut[axis] = slice(low - offset, high - offset)
        at = cut[axis].start - along.start
        block_cut[axis] = slice(at + low, at + high)
        narrowed = Block(block.part, tuple(index), tuple(merged), tuple(local_cut))
        yield number, tuple(block_cut), narrowed


def _span(block: Block, shape: Sequence[int], dim: int) -> tuple[int, int, int | None, int]:
    """Where a block lies along a dimension of its parameter: first and last element, the axis of
    the merged view that the dimension leads (None if the block has one element of it), and how many
    elements along that axis one element of the dimension is."""
    at = block.index[dim] if dim < len(block.index) else slice(None)
    if isinstance(at, int):
        return at, at + 1, None, 1
    first, last, _ = at.indices(shape[dim])
    if last - first == 1:
        return first, last, None, 1
    lengths = []  # of the dimensions that the index leaves
    for i, size in enumerate(shape):
        piece = block.index[i] if i < len(block.index) else slice(None)
        if isinstance(piece, slice) and (length := len(range(size)[piece])) != 1:
            lengths.append((i, length))
    axes = iter([i for i, size in enumerate(block.merged) if size != 1])
    axis = next(axes)
    remaining = block.merged[axis]
    for i, length in lengths:
        if remaining == 1:
            axis = next(axes)
            remaining = block.merged[axis]
        if i == dim:
            if remaining != block.merged[axis]:
                raise ValueError(
                    f"a parameter of shape {tuple(shape)} is sharded along dimension {dim}, which "
                    f"its blocks merge with the one before; shard it along another, or give it a "
                    "group with a smaller max_dim"
                )
            return first, last, axis, block.merged[axis] // length
        remaining //= length
    raise AssertionError(f"dimension {dim} of {tuple(shape)} is not in {block}")


@dataclass(frozen=True)
class Arriving:
    """Blocks in flight; `take` waits for them."""

    pending: Sequence[Pending]
    unpack: Callable[[], list[Tensor]]

    def take(self) -> list[Tensor]:
        for pending in self.pending:
            pending.wait()
        return self.unpack()


class BlockExchange:
    """The blocks of one batch, all of one shape, each with an owner among the ranks.

    Args:
        params: the parameter of each block.
        numbers: the number of each block in its parameter.
        blocks: the blocks.
        places: where each parameter is.
        owners: the rank that owns each block.
        dtype: in which blocks travel; None for their own.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        numbers: Sequence[int],
        blocks: Sequence[Block],
        places: Sequence[Place],
        owners: Sequence[int],
        dtype: torch.dtype | None,
    ) -> None:
        self.params, self.numbers = params, numbers
        self.owners, self.dtype = owners, dtype
        self.ranks, self.shape = places[0].ranks, blocks[0].shape
        self.owned = [i for i, owner in enumerate(owners) if owner == self.ranks.rank]
        # how many gradients each block has had, which all ranks count alike
        self.step = torch.zeros(len(blocks), dtype=torch.float64, device="cpu")
        self.present: list[int] = []  # blocks whose parameters have gradients in this step
        self._arriving: dict[str, Arriving] = {}
        self._parts: list[list[BlockPart]] | None = None
        self.local_blocks: list[Block | None] = list(blocks)
        if places[0].shards is not None:
            self._parts = [
                block_parts(block, param.shape, place.shards)
                for param, block, place in zip(params, blocks, places, strict=True)
                if place.shards is not None
            ]
            self.local_blocks = [
                next((part.local for part in parts if part.rank == self.ranks.rank), None)
                for parts in self._parts
            ]

    def request(self, weights: bool) -> None:
        """Start to send this step's gradients, and with `weights` the parameters, to the owners."""
        self.present = [i for i, param in enumerate(self.params) if param.grad is not None]
        self.step[self.present] += 1
        if self.present:
            self._arriving["grad"] = self._collect([self.params[i].grad for i in self.present])
            if weights:
                self._arriving["weight"] = self._collect([self.params[i] for i in self.present])

    def take(self, what: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The present blocks owned here: their "grad" or "weight". [B, ...]"""
        blocks = self._arriving.pop(what).take()
        if not blocks:
            return torch.empty(0, *self.shape, dtype=dtype, device=device)
        return torch.stack(blocks).to(device, dtype)

    def discard(self) -> None:
        """Complete the requests of a rank that owns none of the present blocks."""
        while self._arriving:
            self._arriving.popitem()[1].take()

    def targets(self) -> list[tuple[Tensor, Block]]:
        """The parameters and blocks that `send` brings directions for, in its order."""
        pairs = ((self.params[i], self.local_blocks[i]) for i in self.present)
        return [(param, block) for param, block in pairs if block is not None]

    def send(self, directions: Tensor) -> Arriving:
        """Start to send the directions of the present blocks owned here to where they are written.

        directions: [B, ...]. What arrives has the order of `targets`.
        """
        if self._parts is None:
            return self._gather(directions)
        rank = self.ranks.rank
        sent: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        owned = [i for i in self.present if self.owners[i] == rank]
        for block, i in zip(directions.unbind(), owned, strict=True):
            for part in self._parts[i]:
                sent[part.rank].append(block[part.cut])
        parts = [(i, part) for i in self.present for part in self._parts[i] if part.rank == rank]
        sources = [self.owners[i] for i, _ in parts]
        shapes: list[list[tuple[int, ...]]] = [[] for _ in range(self.ranks.size)]
        for source, (_, part) in zip(sources, parts, strict=True):
            shapes[source].append(part.shape)

        def unpack(received: list[list[Tensor]]) -> list[Tensor]:
            queues = [iter(tensors) for tensors in received]
            return [next(queues[source]) for source in sources]

        return self._exchange(sent, shapes, unpack, directions)

    def _collect(self, tensors: Sequence[Tensor | None]) -> Arriving:
        """Start to bring the present blocks of tensors like the parameters to their owners."""
        locals_ = [local(tensor) for tensor in tensors if tensor is not None]
        rank = self.ranks.rank
        if self._parts is None:
            owned = [
                _read(block, tensor)
                for i, tensor in zip(self.present, locals_, strict=True)
                if self.owners[i] == rank and (block := self.local_blocks[i]) is not None
            ]
            return Arriving([], lambda: owned)
        sent: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        expected: list[list[tuple[int, BlockPart]]] = [[] for _ in range(self.ranks.size)]
        count = 0
        for i, tensor in zip(self.present, locals_, strict=True):
            if (block := self.local_blocks[i]) is not None:
                sent[self.owners[i]].append(_read(block, tensor))
            if self.owners[i] == rank:
                for part in self._parts[i]:
                    expected[part.rank].append((count, part))
                count += 1
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in locals_})
        like = locals_[0].new_empty(0, dtype=dtype)

        def unpack(received: list[list[Tensor]]) -> list[Tensor]:
            blocks = [like.new_empty(self.shape) for _ in range(count)]
            for tensors_of_rank, slots in zip(received, expected, strict=True):
                for tensor, (row, part) in zip(tensors_of_rank, slots, strict=True):
                    blocks[row][part.cut] = tensor
            return blocks

        shapes = [[part.shape for _, part in slots] for slots in expected]
        return self._exchange(sent, shapes, unpack, like)

    def _exchange(
        self,
        sent: list[list[Tensor]],
        shapes: list[list[tuple[int, ...]]],
        unpack: Callable[[list[list[Tensor]]], list[Tensor]],
        like: Tensor,
    ) -> Arriving:
        """An all-to-all of lists of tensors; `shapes`: of those that every rank sends here."""
        dtype = self.dtype or like.dtype
        flat = [tensor.reshape(-1).to(dtype) for tensors in sent for tensor in tensors]
        packed = torch.cat(flat) if flat else like.new_empty(0, dtype=dtype)
        send_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        receive_sizes = [sum(map(prod, of_rank)) for of_rank in shapes]
        received = packed.new_empty(sum(receive_sizes))
        pending = self.ranks.all_to_all_into(received, packed, receive_sizes, send_sizes)

        def arrived() -> list[Tensor]:
            sizes = [prod(shape) for of_rank in shapes for shape in of_rank]
            pieces = iter(received.to(like.dtype).split(sizes))
            return unpack([[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes])

        return Arriving([pending], arrived)

    def _gather(self, directions: Tensor) -> Arriving:
        owners = [self.owners[i] for i in self.present]
        counts, dtype = Counter(owners), self.dtype or directions.dtype
        if _is_gathered(counts, self.ranks.size):
            packed = directions.new_zeros(max(counts.values()), *self.shape, dtype=dtype)
            packed[: len(directions)] = directions
            gathered = packed.new_empty(self.ranks.size, *packed.shape)
            pieces = dict(enumerate(gathered))
            pending = [self.ranks.all_gather_into(gathered, packed)]
        else:
            pieces = {
                owner: directions.to(dtype).contiguous()
                if owner == self.ranks.rank
                else directions.new_empty(count, *self.shape, dtype=dtype)
                for owner, count in sorted(counts.items())
            }
            pending = [self.ranks.broadcast_(piece, owner) for owner, piece in pieces.items()]

        def arrived() -> list[Tensor]:
            queues = {owner: iter(piece.to(directions.dtype)) for owner, piece in pieces.items()}
            return [next(queues[owner]) for owner in owners]

        return Arriving(pending, arrived)


def directions_traffic(owners: Iterable[int], size: int, ranks: int) -> int:
    """Bytes each rank sends to give the directions of blocks of `size` bytes to all ranks."""
    counts = Counter(owners)
    if _is_gathered(counts, ranks):
        return sent_by_gather(max(counts.values()) * size, ranks)
    return sum(sent_by_broadcast(count * size, ranks) for count in counts.values())


def _is_gathered(counts: Mapping[int, int], ranks: int) -> bool:
    """Whether an all-gather, in which all send as many blocks as the rank that owns most, sends at
    most twice what is needed. Large blocks on many ranks come one at a time, each from one rank."""
    return ranks * max(counts.values()) <= 2 * sum(counts.values())


def _read(block: Block, tensor: Tensor) -> Tensor:
    return tensor[block.index].reshape(block.merged)[block.cut]
