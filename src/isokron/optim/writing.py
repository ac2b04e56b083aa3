"""Updates of blocks, made steps of their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import Arriving, local
from isokron.optim.blocks import Batch, Row, Tile
from isokron.optim.groups import decay_rate, learning_rate
from isokron.optim.moments import heavy_ball_

# (parameter, number of its part) → the part, and its copy in an order that blocks can be cut from
Copies = dict[tuple[Tensor, int], tuple[Tensor, Tensor]]


@dataclass
class Update:
    """The update of a batch, on its way; `at`: the batch's rows that step, None for all."""

    batch: Batch
    at: Tensor | None
    tiles: list[Tile]
    state: dict[str, Tensor]
    direction: Tensor  # [B, ...]
    coming: Arriving | None = None

    @property
    def rows(self) -> list[Row]:
        return self.batch.rows_of(self.tiles)

    def finish_(self, group: Mapping[str, Any]) -> None:
        """P, and the state back to where it lives; what others have found is on its way."""
        if self.tiles:
            if "velocity" in self.state:
                self.direction = heavy_ball_(self.state["velocity"], self.direction, group)
            self.batch.put_(self.state, self.at)
        if self.batch.shared is not None:
            self.coming = self.batch.shared.spread(self.direction)

    def write_(self, group: Mapping[str, Any], copies: Copies) -> None:
        """W ← W(1 − lr·λ) − lr·P"""
        lr, rate = learning_rate(group), decay_rate(group)
        batch = self.batch
        if batch.small:
            weights = batch.weights(self.tiles)
            _step_([weights], [self.direction], lr, rate)
            torch._foreach_copy_([tile.param for tile in self.tiles], list(weights.unbind()))
        elif self.coming is None or batch.shared is None:
            blocks = [tile.cells(_writable(tile, copies)) for tile in self.tiles]
            _step_(blocks, self._cells(), lr, rate)
        else:
            blocks = [_writable(row, copies) for row in batch.shared.written()]
            _step_(blocks, self.coming.take(), lr, rate)

    def _cells(self) -> list[Tensor]:
        """The direction of every tile."""
        if len(self.tiles) == len(self.direction):
            return list(self.direction.unbind())
        parts = self.direction.split([len(tile.rows) for tile in self.tiles])
        return [
            part.view(*tile.counts, *part.shape[1:]) if len(tile.rows) > 1 else part[0]
            for tile, part in zip(self.tiles, parts, strict=True)
        ]


def unowned(batch: Batch) -> Update | None:
    """Of a batch of which no row that steps is owned here; None if no row steps anywhere."""
    if batch.shared is None or not batch.shared.at:
        return None
    for what in list(batch.shared.coming):
        batch.gradients([]) if what == "grad" else batch.weights([])
    nothing = torch.empty(0, *batch.shape, dtype=batch.dtype, device=batch.device)
    return Update(batch, None, [], {}, nothing)


def _step_(blocks: list[Tensor], found: list[Tensor], lr: Any, rate: Any) -> None:
    if not blocks:
        return
    if rate:
        torch._foreach_mul_(blocks, 1 - lr * rate)
    if isinstance(lr, Tensor):
        found, lr = list(torch._foreach_mul(found, lr)), 1.0
    torch._foreach_sub_(blocks, found, alpha=lr)


def write_back(copies: Copies) -> None:
    """Parameters that had to be written to as copies."""
    for part, copy in copies.values():
        part.copy_(copy.view(part.shape))


def _writable(row: Row | Tile, copies: Copies) -> Tensor:
    """Its block as a view to write into: of the parameter, or of a copy kept for the step."""
    block, param = row.block, local(row.param)
    if isinstance(row, Tile) and row.whole:
        return param
    try:
        return block.view(param)
    except RuntimeError:  # strides that do not merge, such as channels_last
        part = param[block.index]
        key = (row.param, block.part)
        _, copy = copies.setdefault(key, (part, part.reshape(block.merged)))
        return copy[block.cut]
