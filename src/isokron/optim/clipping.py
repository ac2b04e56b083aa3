"""A length for every layer of a parameter, whose blocks may be in several batches.

A layer is a part of a parameter that its blocks were cut from: one of a stack, or of a split.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isokron.linalg import sent
from isokron.optim.blocks import Row
from isokron.optim.grafting import norms, sums_by_owner
from isokron.optim.writing import Update

Rows = Sequence[Sequence[Row]]  # of every batch
NORM_EPS = 1e-6


def clip_by_layer_(updates: Sequence[Update], most: float, divisor: float) -> None:
    """P ← P·min(1, most/rms(P))/divisor, the root mean square being that of a whole layer."""
    rows, directions = [u.rows for u in updates], [u.direction for u in updates]
    layers = _layers(rows)
    sizes = [0] * (max(layers) + 1)
    counts = [direction[0].numel() for direction in directions for _ in range(len(direction))]
    for layer, count in zip(layers, counts, strict=True):
        sizes[layer] += count
    energy = _energy(directions, layers)
    size = torch.tensor([sizes[layer] for layer in layers], dtype=energy.dtype, device="cpu")
    mean = energy / sent(size, energy.device)
    scale = most / mean.sqrt().clamp_min(most) / divisor
    for direction, part in zip(directions, _by_batch(scale, directions), strict=True):
        direction.mul_(part)


def normalized_by_layer(blocks: Sequence[Tensor], rows: Rows) -> list[Tensor]:
    """G/(‖G‖ + 10⁻⁶), the norm being that of a whole layer. blocks: one [B, ...] a batch"""
    if not blocks:
        return []
    length = _energy(blocks, _layers(rows)).sqrt() + NORM_EPS
    return [x / part for x, part in zip(blocks, _by_batch(length, blocks), strict=True)]


def _layers(rows: Rows) -> list[int]:
    """The number of every row's layer, over all batches."""
    numbers: dict[tuple[Tensor, int], int] = {}
    keys = [(row.param, row.block.part) for several in rows for row in several]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _energy(blocks: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Σ x² of every row's layer. [ΣB]"""
    return sums_by_owner([norms(x).square() for x in blocks], layers)


def _by_batch(values: Tensor, blocks: Sequence[Tensor]) -> list[Tensor]:
    """A number a row, shaped to broadcast over its block."""
    parts = values.split([len(x) for x in blocks])
    return [part.to(x).view(-1, *[1] * (x.ndim - 1)) for part, x in zip(parts, blocks, strict=True)]
