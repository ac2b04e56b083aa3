"""A length for every layer of a parameter, whose blocks may be in several batches."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isokron.distributed import local
from isokron.linalg import sent
from isokron.optim.blocks import Row
from isokron.optim.grafting import norms, sums_by_owner
from isokron.optim.writing import Update

Layer = tuple[Tensor, int]  # a parameter, and the number of its part


def clip_by_layer_(updates: Sequence[Update], most: float, divisor: float) -> None:
    """P ← P·min(1, most/rms(P))/divisor, the root mean square being that of a whole layer.

    A layer is a part of a parameter that its blocks were cut from: one of a stack, or of a split.
    """
    numbers: dict[Layer, int] = {}
    keys = [(row.param, row.block.part) for update in updates for row in update.rows]
    owners = [numbers.setdefault(key, len(numbers)) for key in keys]
    energy = sums_by_owner([norms(update.direction).square() for update in updates], owners)
    blocks = [update.direction[0].numel() for update in updates for _ in update.rows]
    sizes = [0] * len(numbers)
    for owner, elements in zip(owners, blocks, strict=True):
        sizes[owner] += elements
    size = torch.tensor([sizes[owner] for owner in owners], dtype=energy.dtype, device="cpu")
    mean = energy / sent(size, energy.device)
    scale = most / mean.sqrt().clamp_min(most) / divisor
    parts = scale.split([len(update.rows) for update in updates])
    for update, part in zip(updates, parts, strict=True):
        direction = update.direction
        direction.mul_(part.to(direction).view(-1, *[1] * (direction.ndim - 1)))


def layer_norms(rows: Sequence[Row], known: Mapping[Layer, Tensor]) -> Tensor:
    """The norm of the gradient of each row's layer, in float64. [B]

    `known`: those of layers of which only a part is here.
    """
    found = dict(known)
    for row in rows:
        key = (row.param, row.block.part)
        if key not in found and row.param.grad is not None:
            part = local(row.param.grad)[row.block.index]
            found[key] = torch.linalg.vector_norm(part, dtype=torch.float64)
    return torch.stack([found[row.param, row.block.part] for row in rows])
