"""How parameters lie on ranks: whole on all of them, or cut along their first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from isokron.distributed.places import chunk_bounds

KINDS = ("ddp", "fsdp", "hsdp")


@dataclass(frozen=True)
class Layout:
    """`ranks` processes, of which each `size` share an optimizer's work and state.

    `size` 1 and not `shared`: all of them have all of it, as without `distribute()`. `sharded`:
    parameters are cut along dimension 0, as by FSDP2. `communication`: in which blocks travel.
    """

    kind: str
    ranks: int
    size: int
    sharded: bool = False
    shared: bool = True
    communication: torch.dtype | None = None

    def is_cut(self, shape: Sequence[int]) -> bool:
        """Whether ranks have parts of such a parameter; a scalar is always whole."""
        return self.sharded and len(shape) > 0

    def bounds(self, length: int) -> tuple[int, ...]:
        """Where a first dimension is cut."""
        return _bounds(length, self.size)

    def part_sizes(self, shape: Sequence[int]) -> np.ndarray:
        """Elements of the parts of a parameter, by rank; a scalar is stepped by all. [size]"""
        if not shape:
            return np.ones(self.size, dtype=np.int64)
        return _lengths(shape[0], self.size) * torch.Size(shape[1:]).numel()

    def alone(self) -> Layout:
        """The same ranks, each of which has the whole state and steps whole parameters."""
        return Layout(self.kind, self.ranks, 1, shared=False)


def make_layout(
    kind: str, ranks: int, shard: int | None = None, communication: torch.dtype | None = None
) -> Layout:
    """Checked. `shard`: of "hsdp", how many ranks have the shards of one copy."""
    if kind not in KINDS:
        raise ValueError(f"layout must be one of {', '.join(KINDS)}, got {kind!r}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if (shard is not None) != (kind == "hsdp"):
        wrong = "must be given for hsdp" if shard is None else f"is of hsdp, not of {kind}"
        raise ValueError(f"shard {wrong}: how many ranks have the shards of one copy")
    if shard is not None and (shard < 1 or ranks % shard):
        raise ValueError(f"shard must divide the {ranks} ranks, got {shard}")
    return Layout(kind, ranks, shard or ranks, kind != "ddp", communication=communication)


@lru_cache(maxsize=256)
def _bounds(length: int, size: int) -> tuple[int, ...]:
    return chunk_bounds(length, size)


@lru_cache(maxsize=256)
def _lengths(length: int, size: int) -> np.ndarray:
    return np.diff(_bounds(length, size))
