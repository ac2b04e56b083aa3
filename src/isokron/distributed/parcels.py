"""Many tensors that travel as one: sums of everybody's, everybody's own, and rows for everybody."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from isokron.distributed.ranks import Ranks

Form = tuple[tuple[int, ...], torch.dtype]
Parcels = list[list[Tensor]]  # of every rank


def sum_(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Everybody's sum of each, in place: one collective a dtype."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        some = [tensor for tensor in tensors if tensor.dtype is dtype]
        device = ranks.near(some[0].device)
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in some])
        ranks.all_reduce_(flat)
        for tensor, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def gather(ranks: Ranks, own: Sequence[Tensor], forms: Sequence[Sequence[Form]]) -> Parcels:
    """Everybody's tensors, whose shapes and dtypes all know: one collective, padded to the longest.

    forms: those of every rank. The tensors are where `ranks.device` is.
    """
    sizes = [[prod(shape) * dtype.itemsize for shape, dtype in several] for several in forms]
    packed = torch.zeros(max(map(sum, sizes), default=0), dtype=torch.uint8, device=ranks.device)
    if not len(packed):
        return [[torch.empty(shape, dtype=dtype) for shape, dtype in of] for of in forms]
    coded = [tensor.contiguous().view(-1).view(torch.uint8).to(ranks.device) for tensor in own]
    if coded:
        flat = torch.cat(coded)
        packed[: len(flat)] = flat
    found = []
    for row, lengths, several in zip(ranks.all_gather(packed), sizes, forms, strict=True):
        parts = row[: sum(lengths)].split(lengths)
        found.append(
            # a copy begins where its dtype may begin
            [
                part.clone().view(dtype).view(shape)
                for part, (shape, dtype) in zip(parts, several, strict=True)
            ]
        )
    return found


def bounds(size: int, count: int) -> list[tuple[int, int]]:
    """First row and end of everybody's part of `size` rows."""
    return [(size * r // count, size * (r + 1) // count) for r in range(count)]


def columns_to_rows(ranks: Ranks, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Everybody's own columns of U, whole, to everybody's own rows of all of U.

    rows: [B, T of this rank, o], transposed columns; counts: T of every rank. → [B, o/R, ΣT]
    """
    blocks, _, size = rows.shape
    parts = bounds(size, ranks.size)
    sent = torch.cat([rows[..., a:b].reshape(-1) for a, b in parts])
    sent = sent.to(ranks.near(rows.device))
    first, last = parts[ranks.rank]
    of_each = [blocks * count * (last - first) for count in counts]
    to_each = [blocks * rows.size(1) * (b - a) for a, b in parts]
    received = sent.new_empty(sum(of_each))
    ranks.all_to_all_into(received, sent, of_each, to_each).wait()
    cut = received.split(of_each)
    return torch.cat(
        [part.view(blocks, count, last - first) for part, count in zip(cut, counts, strict=True)], 1
    ).mT.contiguous()
