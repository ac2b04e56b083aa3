"""How equal blocks travel: from the ranks that have their elements to their owners, and back.

One collective a batch: all-to-all where parameters are sharded; where everybody has the whole, only
what owners have made travels, by an all-gather.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isokron.distributed.ranks import Pending, Ranks
from isokron.distributed.regions import Holder
from isokron.distributed.traffic import padded_rows


@dataclass(frozen=True)
class Arriving:
    """Blocks on their way; `take` waits for them."""

    pending: Pending | None
    unpack: Callable[[], list[Tensor]]

    def take(self) -> list[Tensor]:
        if self.pending is not None:
            self.pending.wait()
        return self.unpack()


class Travel:
    """Of the blocks of one batch, all of one shape.

    `owners`: of each block, a rank. `held`: of each block, who has what of it; None where all ranks
    have all of all. `dtype`: in which blocks travel, None for their own.
    """

    def __init__(
        self,
        ranks: Ranks,
        shape: Sequence[int],
        owners: Sequence[int],
        held: Sequence[Sequence[Holder]] | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.ranks, self.shape, self.owners, self.dtype = ranks, tuple(shape), owners, dtype
        self.held = held
        self.own = [i for i, owner in enumerate(owners) if owner == ranks.rank]

    def collect(self, pieces: Sequence[Tensor | None], at: Sequence[int], like: Tensor) -> Arriving:
        """Begin to bring blocks `at` to their owners; those owned here arrive, in order.

        pieces: what is here of each, None where nothing is. like: [0], of the device they come on.
        """
        if self.held is None:
            pairs = zip(at, pieces, strict=True)
            read = [piece for i, piece in pairs if self._is_mine(i) and piece is not None]
            return Arriving(None, lambda: read)
        sent: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        for i, piece in zip(at, pieces, strict=True):
            if piece is not None:
                sent[self.owners[i]].append(piece)
        mine = [i for i in at if self._is_mine(i)]
        expected: list[list[tuple[int, Holder]]] = [[] for _ in range(self.ranks.size)]
        for row, i in enumerate(mine):
            for holder in self.held[i]:
                expected[holder.rank].append((row, holder))

        def unpack(received: list[list[Tensor]]) -> list[Tensor]:
            blocks = [like.new_empty(self.shape) for _ in mine]
            for parts, places in zip(received, expected, strict=True):
                for part, (row, holder) in zip(parts, places, strict=True):
                    blocks[row].narrow(holder.axis, holder.lo, holder.hi - holder.lo).copy_(part)
            return blocks

        sizes = [[self._shape(holder) for _, holder in places] for places in expected]
        return self._exchange(sent, sizes, unpack, like)

    def spread(self, blocks: Sequence[Tensor], at: Sequence[int], like: Tensor) -> Arriving:
        """Begin to bring back what owners have made of blocks `at`; what is here of each arrives,
        in the order of `at`, leaving out those of which nothing is here. blocks: those owned here.
        """
        if self.held is None:
            return self._gather(blocks, at, like)
        held, rank = self.held, self.ranks.rank
        sent: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        for block, i in zip(blocks, (i for i in at if self._is_mine(i)), strict=True):
            for holder in held[i]:
                part = block.narrow(holder.axis, holder.lo, holder.hi - holder.lo)
                sent[holder.rank].append(part)
        here = [(self.owners[i], each) for i in at for each in held[i] if each.rank == rank]
        sizes: list[list[torch.Size]] = [[] for _ in range(self.ranks.size)]
        for owner, holder in here:
            sizes[owner].append(self._shape(holder))

        def unpack(received: list[list[Tensor]]) -> list[Tensor]:
            turns = [iter(parts) for parts in received]
            return [next(turns[owner]) for owner, _ in here]

        return self._exchange(sent, sizes, unpack, like)

    def _is_mine(self, i: int) -> bool:
        return self.owners[i] == self.ranks.rank

    def _shape(self, holder: Holder) -> torch.Size:
        shape = list(self.shape)
        shape[holder.axis] = holder.hi - holder.lo
        return torch.Size(shape)

    def _exchange(
        self,
        sent: list[list[Tensor]],
        sizes: list[list[torch.Size]],
        unpack: Callable[[list[list[Tensor]]], list[Tensor]],
        like: Tensor,
    ) -> Arriving:
        dtype = self.dtype or like.dtype
        flat = [part.reshape(-1).to(dtype) for parts in sent for part in parts]
        given = torch.cat(flat) if flat else like.new_empty(0, dtype=dtype)
        to_each = [sum(part.numel() for part in parts) for parts in sent]
        of_each = [sum(size.numel() for size in several) for several in sizes]
        received = given.new_empty(sum(of_each))
        pending = self.ranks.all_to_all_into(received, given, of_each, to_each)

        def arrived() -> list[Tensor]:
            flat = iter(received.to(like.dtype).split([n.numel() for each in sizes for n in each]))
            return unpack([[next(flat).view(size) for size in several] for several in sizes])

        return Arriving(pending, arrived)

    def _gather(self, blocks: Sequence[Tensor], at: Sequence[int], like: Tensor) -> Arriving:
        owners = [self.owners[i] for i in at]
        dtype = self.dtype or like.dtype
        own = like.new_zeros(padded_rows(owners), *self.shape, dtype=dtype)
        for row, block in zip(own, blocks, strict=False):
            row.copy_(block)
        everything = own.new_empty(self.ranks.size, *own.shape)
        pending = self.ranks.all_gather_into(everything, own)

        def arrived() -> list[Tensor]:
            turns = [iter(rows.to(like.dtype)) for rows in everything]
            return [next(turns[owner]) for owner in owners]

        return Arriving(pending, arrived)
