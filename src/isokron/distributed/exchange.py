"""How a bucket travels: gradients to the owners of their pieces, and pieces back to everybody.

A reduce_scatter and an all_gather, both under way while others do something else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from isokron.distributed.buckets import Bucket, Piece
from isokron.distributed.ranks import Pending, Ranks


@dataclass(frozen=True)
class Reducing:
    """A bucket of gradients on its way to the owners of the pieces."""

    bucket: Bucket
    arriving: Tensor  # [section], the sum; or [R, section], what is to be added, by rank
    whole: Tensor  # [R·section]; kept until all of it is sent
    pending: Pending

    def done(self) -> bool:
        return bool(self.pending.work.is_completed())

    def average(self) -> Tensor:
        """This rank's section of (g₀ + g₁ + …)/R. [section]"""
        self.pending.wait()
        rows = self.arriving.unbind() if self.arriving.ndim == 2 else [self.arriving]
        total = rows[0] + rows[1] if len(rows) > 1 else rows[0]
        for row in rows[2:]:
            total += row
        return total.div_(self.pending.ranks.size)


def begin_reduce(
    ranks: Ranks, bucket: Bucket, grads: Mapping[int, Tensor], like: Tensor
) -> Reducing:
    """Send gradients, by number of their parameter and none where there is none, to the owners.

    `like`: has the dtype and device in which they are added.
    """
    whole = like.new_empty(ranks.size * bucket.section)
    ends = [0] * ranks.size
    to, of = [], []
    for i, pieces in _by_parameter(bucket).items():
        flat = _flattened(grads[i]) if i in grads else None
        for piece in pieces:
            at = piece.owner * bucket.section + piece.start
            slot = whole[at : at + piece.length]
            ends[piece.owner] = max(ends[piece.owner], piece.start + piece.length)
            if flat is None:
                slot.zero_()
            else:
                to.append(slot)
                of.append(flat[piece.offset : piece.offset + piece.length])
    if to:
        torch._foreach_copy_(to, of)
    for rank, end in enumerate(ends):
        whole[rank * bucket.section + end : (rank + 1) * bucket.section].zero_()
    if not added_by_hand(whole.device):
        own = like.new_empty(bucket.section)
        pending = ranks.reduce_scatter_into(own, whole, dist.ReduceOp.SUM)
        return Reducing(bucket, own, whole, pending)
    rows = like.new_empty(ranks.size, bucket.section)
    sizes = [bucket.section] * ranks.size
    pending = ranks.all_to_all_into(rows.view(-1), whole, sizes, sizes)
    return Reducing(bucket, rows, whole, pending)


def added_by_hand(device: torch.device) -> bool:
    """Whether sections go to their owners as they are and are added there, in the order of ranks.

    gloo's reduce_scatter is an all_reduce of everything, of which the end cannot be asked for or
    limited in time; by hand it is half of the bytes.
    """
    return device.type == "cpu"


@dataclass(frozen=True)
class Gathering:
    """Owned pieces on their way to all ranks."""

    bucket: Bucket
    everything: Tensor  # [R, section]
    own: Tensor  # kept until it is sent
    pending: Pending

    def write_(self, flats: Mapping[int, Tensor], wanted: Sequence[Piece]) -> None:
        """Put these pieces into the flattened tensors they belong to."""
        self.pending.wait()
        to = [flats[p.parameter][p.offset : p.offset + p.length] for p in wanted]
        of = [self.everything[p.owner, p.start : p.start + p.length] for p in wanted]
        if to:
            torch._foreach_copy_(to, of)


def begin_gather(
    ranks: Ranks, bucket: Bucket, owned: Mapping[Piece, Tensor], like: Tensor
) -> Gathering:
    """Send everybody the pieces this rank owns. `like`: has the dtype and device they travel in."""
    own = like.new_zeros(bucket.section)
    if owned:
        slots = [own[piece.start : piece.start + piece.length] for piece in owned]
        torch._foreach_copy_(slots, list(owned.values()))
    everything = like.new_empty(ranks.size, bucket.section)
    return Gathering(bucket, everything, own, ranks.all_gather_into(everything, own))


def _by_parameter(bucket: Bucket) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in bucket.pieces:
        found.setdefault(piece.parameter, []).append(piece)
    return found


def _flattened(grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided or grad.is_complex():
        raise RuntimeError(
            f"a gradient of shape {tuple(grad.shape)} is sparse or complex ({grad.layout}, "
            f"{grad.dtype}) and cannot be averaged over ranks; make the layer with sparse=False, "
            "and take the gradient of a real loss of real parameters"
        )
    return grad.detach().reshape(-1)
