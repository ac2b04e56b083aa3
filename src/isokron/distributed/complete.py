"""Tensors of which ranks have parts, put together on all of them or on one, a bucket at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from isokron.distributed.ranks import Pending, Ranks

Name = tuple[int, str]  # a parameter's number, and a key of its state

BUCKET = 32 << 20  # bytes that travel at once
ALIGNMENT = 16  # bytes: where elements of any dtype may begin


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `lo` to `hi` along `axis` of a tensor, which `rank` has; `here`: if it is this."""

    rank: int
    axis: int
    lo: int
    hi: int
    here: Tensor | None


@dataclass(frozen=True, slots=True)
class Divided:
    """A tensor in parts that ranks have; a number is one element along axis 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class _Slice:
    """What of a part travels in one bucket."""

    name: Name
    part: Part
    lo: int
    hi: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, tensor: Tensor, first: int) -> Tensor:
        """These elements of a tensor that begins with element `first`."""
        return _long(tensor).narrow(self.part.axis, self.lo - first, self.hi - self.lo)


def completed(
    ranks: Ranks,
    tensors: Mapping[Name, Divided],
    to: int | None = None,
    bucket_bytes: int = BUCKET,
) -> dict[Name, Tensor]:
    """The whole tensors, on all ranks or on rank `to`; others get none. All must call it alike.

    Each part is sent by the rank that has it to those that do not. Beside the result there is one
    bucket, of `bucket_bytes` or of one element along the axis of a part.
    """
    receives = to is None or to == ranks.rank
    whole = {name: _begun(each) for name, each in tensors.items()} if receives else {}
    senders = [rank for rank in range(ranks.size) if rank != to] if ranks.size > 1 else []
    mine = [rank for rank in senders if to is None or ranks.rank in (rank, to)]
    queues = [list(_buckets(tensors, rank, bucket_bytes)) for rank in mine]
    largest = max((_size(slices) for queue in queues for slices in queue), default=0)
    bucket = torch.empty(largest, dtype=torch.uint8, device=ranks.device)
    # by turns: nobody waits for longer than others need for a bucket each
    for turn in zip_longest(*queues, fillvalue=()):
        for rank, slices in zip(mine, turn, strict=True):
            if slices:
                _carry(ranks, rank, slices, to, bucket[: _size(slices)], whole)
    return whole


def _begun(tensor: Divided) -> Tensor:
    """The whole of it with what is here; it itself, where all of it is."""
    own = [(part, part.here) for part in tensor.parts if part.here is not None]
    if len(tensor.parts) == len(own) == 1:
        return own[0][1]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for part, here in own:
        _long(whole).narrow(part.axis, part.lo, part.hi - part.lo).copy_(_long(here))
    return whole


def _buckets(tensors: Mapping[Name, Divided], rank: int, most: int) -> Iterator[list[_Slice]]:
    """What a rank has to send, in order, cut into buckets."""
    bucket: list[_Slice] = []
    filled = 0
    for name, tensor in tensors.items():
        for part in tensor.parts:
            for each in _slices(name, tensor, part, most) if part.rank == rank else ():
                if bucket and filled + _aligned(each.size) > most:
                    yield bucket
                    bucket, filled = [], 0
                bucket.append(each)
                filled += _aligned(each.size)
    if bucket:
        yield bucket


def _slices(name: Name, tensor: Divided, part: Part, most: int) -> Iterator[_Slice]:
    shape = tensor.shape or (1,)
    row = prod(shape) // shape[part.axis] * tensor.dtype.itemsize if prod(shape) else 0
    rows = max(1, most // row) if row else 0
    for lo in range(part.lo, part.hi, rows) if rows else ():
        hi = min(lo + rows, part.hi)
        cut = (*shape[: part.axis], hi - lo, *shape[part.axis + 1 :])
        yield _Slice(name, part, lo, hi, cut, tensor.dtype)


def _carry(
    ranks: Ranks,
    sender: int,
    slices: Sequence[_Slice],
    to: int | None,
    bucket: Tensor,
    whole: dict[Name, Tensor],
) -> None:
    """Bring slices from their sender, in a bucket, into the whole tensors."""
    flats = bucket.split([_aligned(each.size) for each in slices])
    slots = [
        flat[: each.size].view(each.dtype).view(each.shape)
        for flat, each in zip(flats, slices, strict=True)
    ]
    sends = ranks.rank == sender
    if sends:
        for slot, each in zip(slots, slices, strict=True):
            if each.part.here is not None:
                slot.copy_(each.of(each.part.here, each.part.lo))
        ranks.traffic.sent += bucket.numel() * (ranks.size - 1 if to is None else 1)
    _travel(ranks, bucket, sender, to)
    if not sends:
        for slot, each in zip(slots, slices, strict=True):
            each.of(whole[each.name], 0).copy_(slot)


def _travel(ranks: Ranks, bucket: Tensor, sender: int, to: int | None) -> None:
    group, what = ranks.group, "a full state dict"
    if to is None:
        work: Any = dist.broadcast(bucket, group=group, group_src=sender, async_op=True)
    elif ranks.rank == sender:
        work = dist.isend(bucket, group=group, group_dst=to)
    else:
        work = dist.irecv(bucket, group=group, group_src=sender)
    Pending(work, what, ranks).wait()


def _size(slices: Sequence[_Slice]) -> int:
    return sum(_aligned(each.size) for each in slices)


def _long(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.view(1)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
