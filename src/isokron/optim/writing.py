"""Updates of blocks, made steps of their parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isokron.optim.blocks import Batch, Row
from isokron.optim.grafting import graft_together
from isokron.optim.groups import decay_rate, learning_rate
from isokron.optim.moments import heavy_ball_

# (parameter, number of its part) → the part, and its copy in an order that blocks can be cut from
Copies = dict[tuple[Tensor, int], tuple[Tensor, Tensor]]


@dataclass
class Update:
    """The update of a batch, on its way; `at`: the batch's rows that step, None for all."""

    batch: Batch
    at: Tensor | None
    rows: list[Row]
    state: dict[str, Tensor]
    direction: Tensor  # [B, ...]
    simple: Tensor | None  # the grafted method's direction
    alone: Tensor | None  # rows that it steps alone. [B], on the CPU

    def write_(self, group: Mapping[str, Any], copies: Copies) -> None:
        """W ← W(1 − lr·λ) − lr·P, and the state back to where it lives."""
        direction = self.direction
        if "velocity" in self.state:
            direction = heavy_ball_(self.state["velocity"], direction, group)
        self.batch.put_(self.state, self.at)
        blocks = [_writable(row, copies) for row in self.rows]
        lr, rate = learning_rate(group), decay_rate(group)
        if rate:
            torch._foreach_mul_(blocks, 1 - lr * rate)
        if isinstance(lr, Tensor):
            direction, lr = direction * lr, 1.0
        torch._foreach_sub_(blocks, direction.unbind(), alpha=lr)


def graft_by_parameter_(updates: Sequence[Update], params: Sequence[Tensor]) -> None:
    """Lengths compared over all blocks of a parameter, in whatever batches they are."""
    number = {param: i for i, param in enumerate(params)}
    owners = [torch.tensor([number[row.param] for row in update.rows]) for update in updates]
    owners = [
        owner if update.alone is None else owner.masked_fill(update.alone, -1)
        for owner, update in zip(owners, updates, strict=True)
    ]
    simple = [update.simple for update in updates if update.simple is not None]
    grafted = graft_together([update.direction for update in updates], simple, owners)
    for update, direction in zip(updates, grafted, strict=True):
        update.direction = direction


def write_back(copies: Copies) -> None:
    """Parameters that had to be written to as copies."""
    for part, copy in copies.values():
        part.copy_(copy.view(part.shape))


def _writable(row: Row, copies: Copies) -> Tensor:
    """The row's block as a view to write into: of the parameter, or of a copy kept for the step."""
    block = row.block
    try:
        return block.view(row.param)
    except RuntimeError:  # strides that do not merge, such as channels_last
        part = row.param[block.index]
        key = (row.param, block.part)
        _, copy = copies.setdefault(key, (part, part.reshape(block.merged)))
        return copy[block.cut]
