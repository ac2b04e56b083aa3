"""Rows of a batch that several processes work on: each owns some and writes what it has of all."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from isokron.block_layout import Block
from isokron.distributed import (
    Arriving,
    Place,
    Travel,
    block_of_shard,
    holders,
    local,
)
from isokron.optim.blocks import Row


class Shared:
    """All rows of a batch, whoever owns them.

    `here`: of every row, what this process has of its block, as a block of its part of the
    parameter. `step`: how many gradients every row has seen, which all processes know.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        places: Sequence[Place],
        owners: Sequence[int],
        dtype: torch.dtype | None,
    ) -> None:
        self.rows = list(rows)
        ranks = places[0].ranks
        self.here: list[Block | None] = [row.block for row in rows]
        held = None
        if places[0].dim is not None:
            held = []
            for i, (row, place) in enumerate(zip(rows, places, strict=True)):
                dim, bounds, shape = place.dim or 0, place.bounds, row.param.shape
                held.append(holders(row.block, shape, dim, bounds))
                lo, hi = bounds[ranks.rank], bounds[ranks.rank + 1]
                self.here[i] = block_of_shard(row.block, shape, dim, lo, hi)
        self.travel = Travel(ranks, rows[0].block.shape, owners, held, dtype)
        self.step = torch.zeros(len(rows), dtype=torch.float32, device="cpu")
        self.at: list[int] = []
        self.coming: dict[str, Arriving] = {}

    @property
    def own(self) -> list[Row]:
        """The rows this process owns, in their order."""
        return [self.rows[i] for i in self.travel.own]

    def call_(self, weights: bool) -> None:
        """Begin to bring this step's gradients, and with `weights` the parameters, to owners."""
        self.at = [i for i, row in enumerate(self.rows) if row.param.grad is not None]
        self.step[self.at] += 1
        if self.at:
            self.coming["grad"] = self._collect(lambda param: param.grad)
            if weights:
                self.coming["weight"] = self._collect(lambda param: param)

    def arrived(self, what: str, like: Tensor) -> Tensor:
        """The blocks of the present rows that are owned here, in the dtype of `like`. [B, ...]"""
        blocks = self.coming.pop(what).take()
        return torch.stack(blocks).to(like) if blocks else like.new_empty(0, *self.travel.shape)

    def spread(self, direction: Tensor) -> Arriving:
        """Begin to bring what was found for own rows to where it is written."""
        return self.travel.spread(direction.unbind(), self.at, direction)

    def written(self) -> list[Row]:
        """Where what `spread` brings is written, in its order."""
        spots = ((self.rows[i], self.here[i]) for i in self.at)
        return [Row(row.param, spot, row.number) for row, spot in spots if spot is not None]

    def _collect(self, of: Callable[[Tensor], Tensor | None]) -> Arriving:
        found = [(self.here[i], of(self.rows[i].param)) for i in self.at]
        whole = [(spot, local(tensor)) for spot, tensor in found if tensor is not None]
        sharded, own = self.travel.held is not None, set(self.travel.own)
        pieces = [
            spot.read(tensor) if spot is not None and (sharded or i in own) else None
            for i, (spot, tensor) in zip(self.at, whole, strict=True)
        ]
        dtype = reduce(torch.promote_types, {tensor.dtype for _, tensor in whole})
        return self.travel.collect(pieces, self.at, whole[0][1].new_empty(0, dtype=dtype))
