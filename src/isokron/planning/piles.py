"""Equal blocks of many parameters, in the order of an engine's batches, as arrays of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from isokron.block_layout import Block
from isokron.distributed import holders
from isokron.optim.engine import Preconditioned
from isokron.planning.layouts import Layout


@dataclass(frozen=True)
class Cut:
    """The n blocks of one shape that parameters of one shape have.

    `first`: of them. `parts`: of the parameter that each belongs to, [n]. Where ranks have parts of
    blocks, rank r has `sizes[kinds[i], r]` elements of block i; else `sizes` is None.
    """

    first: Block
    parts: np.ndarray
    kinds: np.ndarray
    sizes: np.ndarray | None

    @cached_property
    def here(self) -> np.ndarray:
        """What every rank has of all of them. [size]"""
        assert self.sizes is not None
        return np.bincount(self.kinds, minlength=len(self.sizes)) @ self.sizes


@dataclass
class Pile:
    """The blocks of one batch, by parameter: its number, and its blocks of this shape."""

    shape: tuple[int, ...]
    param: Tensor  # the first
    cuts: list[tuple[int, Cut]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(cut.parts) for _, cut in self.cuts)

    @property
    def sharded(self) -> bool:
        """Whether ranks have parts of the blocks, and not all of all."""
        return self.cuts[0][1].sizes is not None

    def here(self) -> np.ndarray:
        """What every rank has of all blocks. [size]"""
        return sum((cut.here for _, cut in self.cuts), np.zeros(1, dtype=np.int64))

    def kept(self, owners: np.ndarray) -> np.ndarray:
        """What the owner of each block has of it. [n]"""
        found, start = [], 0
        for _, cut in self.cuts:
            assert cut.sizes is not None
            found.append(cut.sizes[cut.kinds, owners[start : start + len(cut.kinds)]])
            start += len(cut.kinds)
        return np.concatenate(found)

    def layers(self) -> np.ndarray:
        """A number a block, the same for blocks of one part of a parameter. [n]"""
        return np.concatenate([(number << 32) + cut.parts for number, cut in self.cuts])


def keys_of(piles: Sequence[Pile], together: str) -> np.ndarray:
    """A number a block, the same for those that one rank must own, all piles' in a row."""
    if together == "block":
        return np.arange(sum(map(len, piles)))
    return np.concatenate([pile.layers() for pile in piles])


def make_piles(
    optimizer: Preconditioned, group: Mapping[str, Any], params: Sequence[Tensor], layout: Layout
) -> list[Pile]:
    """Batches as the engine makes them; parameters of one shape are cut once."""
    piles: dict[tuple[Any, ...], Pile] = {}
    known: dict[tuple[int, ...], dict[tuple[int, ...], Cut]] = {}
    for number, param in enumerate(params):
        shape = tuple(param.shape)
        if shape not in known:
            known[shape] = _cuts(optimizer.cut(shape, group), shape, layout)
        for block_shape, cut in known[shape].items():
            key = (block_shape, param.dtype, layout.is_cut(shape))
            piles.setdefault(key, Pile(block_shape, param)).cuts.append((number, cut))
    return list(piles.values())


def _cuts(
    blocks: Sequence[Block], shape: tuple[int, ...], layout: Layout
) -> dict[tuple[int, ...], Cut]:
    """The blocks of a parameter by their shape, in the order in which shapes come up."""
    equal: dict[tuple[int, ...], list[Block]] = {}
    for block in blocks:
        equal.setdefault(block.shape, []).append(block)
    cuts = {}
    for block_shape, those in equal.items():
        parts = np.array([block.part for block in those])
        kinds, sizes = np.zeros(len(those), dtype=np.int64), None
        if layout.is_cut(shape):
            kinds, sizes = _held(those, shape, layout)
        cuts[block_shape] = Cut(those[0], parts, kinds, sizes)
    return cuts


def _held(
    blocks: Sequence[Block], shape: tuple[int, ...], layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
    """`kinds` and `sizes` of equal blocks: those that lie alike along the axis that is cut, and
    differ along the others, are held by the same ranks."""
    bounds = layout.bounds(shape[0])
    each = int(np.prod(blocks[0].shape, dtype=np.int64))
    axes: dict[int, int] = {}  # by part
    known: dict[tuple[int, int], int] = {}
    kinds: list[int] = []
    sizes: list[np.ndarray] = []
    for block in blocks:
        if block.part not in axes:
            axes[block.part] = holders(block, shape, 0, bounds)[0].axis
        axis = axes[block.part]
        key = (block.part, block.cut[axis].start)
        if key not in known:
            row = np.zeros(layout.size, dtype=np.int64)
            for holder in holders(block, shape, 0, bounds):
                row[holder.rank] = (holder.hi - holder.lo) * each // block.shape[axis]
            known[key] = len(sizes)
            sizes.append(row)
        kinds.append(known[key])
    return np.array(kinds), np.array(sizes)
