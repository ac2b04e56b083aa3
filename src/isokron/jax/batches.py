"""Leaves of any shape to batches of equal blocks, and back."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isokron.block_layout import Grid, Part, cut_grids, cut_parts, is_matrix
from isokron.jax.checks import by_path

Batches = dict[str, jax.Array]  # by the shape of a block


class Piece(NamedTuple):
    """A grid of equal blocks in every matrix of a leaf, and the rows of the batch they take."""

    batch: str
    first: int  # of its rows
    part: Part
    grid: Grid


class Leaf(NamedTuple):
    """A leaf as `layers` matrices; no pieces: the method does not take it."""

    layers: int
    shape: tuple[int, ...]  # of one of them
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]

    def blocks(self, piece: Piece) -> int:
        return self.layers * math.prod(piece.grid.counts)


class Plan(NamedTuple):
    """`rows`: of every batch."""

    leaves: tuple[Leaf, ...]
    rows: dict[str, int]

    def owners(self, batch: str) -> list[int]:
        """The leaf that each row of a batch is a block of."""
        return [
            number
            for number, leaf in enumerate(self.leaves)
            for piece in leaf.pieces
            if piece.batch == batch
            for _ in range(leaf.blocks(piece))
        ]


def plan(tree: Any, group: Mapping[str, Any], order: int | None) -> Plan:
    """Where every block of every leaf goes. `order`: merge dimensions until so many are left."""
    rows: dict[str, int] = {}
    leaves = []
    longest = group["max_dim"] if group["oversize"] == "cut" else None
    stacked = by_path("stacked", tree, group["stacked"])
    for (path, array), lead in zip(jax.tree.leaves_with_path(tree), stacked, strict=True):
        _check_leaf(jax.tree_util.keystr(path), array, lead, group["optimizer"])
        inner = tuple(array.shape[lead:])
        leaf = Leaf(math.prod(array.shape[:lead]), inner, (), ())
        if _takes(array.shape, lead, group["vectors"]):
            try:
                parts = cut_parts(
                    inner,
                    max_dim=group["max_dim"],
                    order=order,
                    split=group["split"],
                    split_dim=group["split_dim"],
                )
            except ValueError as error:
                raise ValueError(
                    f"{group['optimizer']}: leaf {jax.tree_util.keystr(path)}: {error}, or give it "
                    "a transformation of its own with optax.multi_transform"
                ) from None
            leaf = leaf._replace(parts=tuple(parts))
            for part in parts:
                for grid in cut_grids(part.merged, longest):
                    name = "x".join(map(str, grid.shape))
                    piece = Piece(name, rows.get(name, 0), part, grid)
                    rows[name] = piece.first + leaf.blocks(piece)
                    leaf = leaf._replace(pieces=(*leaf.pieces, piece))
        leaves.append(leaf)
    return Plan(tuple(leaves), rows)


def block_shape(batch: str) -> tuple[int, ...]:
    return tuple(map(int, batch.split("x")))


def gather(arrays: Sequence[jax.Array], where: Plan, dtype: Any) -> Batches:
    """All blocks of all leaves, equal ones in one batch. [B, ...]"""
    found: dict[str, list[jax.Array]] = {name: [] for name in where.rows}
    for array, leaf in zip(arrays, where.leaves, strict=True):
        for piece in leaf.pieces:
            found[piece.batch].append(_cut(array.astype(dtype), leaf, piece))
    return {name: _joined(blocks, axis=0) for name, blocks in found.items()}


def scatter(batches: Batches, leaf: Leaf) -> jax.Array:
    """The blocks of one leaf put together again. [layers, ...]"""
    parts = []
    for part in leaf.parts:
        whole = None
        for piece in (piece for piece in leaf.pieces if piece.part is part):
            blocks = batches[piece.batch][piece.first : piece.first + leaf.blocks(piece)]
            cells = blocks.reshape(leaf.layers, *piece.grid.counts, *piece.grid.shape)
            order = len(piece.grid.shape)
            pairs = [axis for i in range(1, order + 1) for axis in (i, i + order)]
            region = cells.transpose(0, *pairs).reshape(leaf.layers, *_extent(piece.grid))
            if region.shape[1:] == part.merged:
                whole = region
            else:
                whole = (
                    jnp.zeros((leaf.layers, *part.merged), blocks.dtype) if whole is None else whole
                )
                whole = whole.at[_slices(piece.grid)].set(region)
        assert whole is not None
        parts.append(whole.reshape(leaf.layers, *part.shape))
    return _joined(parts, axis=max(1, len(leaf.parts[0].narrow)))


def _cut(array: jax.Array, leaf: Leaf, piece: Piece) -> jax.Array:
    whole = array.reshape(leaf.layers, *leaf.shape)[(slice(None), *piece.part.narrow)]
    region = whole.reshape(leaf.layers, *piece.part.merged)[_slices(piece.grid)]
    counts, shape = piece.grid.counts, piece.grid.shape
    pairs = [size for pair in zip(counts, shape, strict=True) for size in pair]
    cells = region.reshape(leaf.layers, *pairs)
    order = range(1, len(pairs), 2)
    cells = cells.transpose(0, *order, *(axis + 1 for axis in order))
    return cells.reshape(leaf.blocks(piece), *shape)


def _extent(grid: Grid) -> tuple[int, ...]:
    return tuple(count * size for count, size in zip(grid.counts, grid.shape, strict=True))


def _slices(grid: Grid) -> tuple[slice, ...]:
    pairs = zip(grid.start, _extent(grid), strict=True)
    return (slice(None), *(slice(start, start + size) for start, size in pairs))


def _joined(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _takes(shape: Sequence[int], stacked: int, vectors: bool) -> bool:
    """Whether the method steps a leaf; what it does not take goes to Adam."""
    vector = vectors and math.prod(shape[stacked:]) > 1
    return 0 not in shape and (vector or is_matrix(shape, stacked))


def _check_leaf(name: str, leaf: Any, stacked: Any, optimizer: str) -> None:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"{optimizer} needs real floating-point leaves, {name} is {leaf.dtype}; leave it out "
            "with optax.masked or optax.multi_transform"
        )
    whole = isinstance(stacked, int) and not isinstance(stacked, bool)
    if not whole or not 0 <= stacked <= len(leaf.shape):
        raise ValueError(
            f"{optimizer}: stacked must be an integer from 0 to {len(leaf.shape)} for {name} of "
            f"shape {tuple(leaf.shape)}, got {stacked!r}"
        )
