"""Leaves to batches of equal blocks, and back."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from isokron.white_kron import Bucket, Leaf, Piece


def gather(matrices: Sequence[jax.Array], bucket: Bucket, rows: int) -> jax.Array:
    """All blocks of a bucket, and zeros up to `rows`. Matrices: [layers, m, n] or [layers, n]."""
    parts = [_cut(matrices[piece.leaf], piece) for piece in bucket.pieces]
    if rows > bucket.blocks:
        parts.append(jnp.zeros((rows - bucket.blocks, *bucket.shape), parts[0].dtype))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def scatter(batches: Mapping[str, jax.Array], leaf: Leaf) -> jax.Array:
    """The leaf's blocks put together again: [layers, m, n] or [layers, n]."""
    bands = [_join([_paste(batches[p.bucket], p) for p in band], axis=2) for band in leaf.bands]
    return _join(bands, axis=1)


def _cut(matrix: jax.Array, piece: Piece) -> jax.Array:
    ends = [s + g * n for s, g, n in zip(piece.start, piece.grid, piece.shape, strict=True)]
    region = matrix[(slice(None), *map(slice, piece.start, ends))]
    if len(piece.shape) == 1 or piece.grid == (1, 1):
        return region
    (down, across), (m, n) = piece.grid, piece.shape
    cells = region.reshape(piece.layers, down, m, across, n).swapaxes(2, 3)
    return cells.reshape(piece.blocks, m, n)


def _paste(batch: jax.Array, piece: Piece) -> jax.Array:
    blocks = batch[piece.first : piece.first + piece.blocks]
    if len(piece.shape) == 1 or piece.grid == (1, 1):
        return blocks
    (down, across), (m, n) = piece.grid, piece.shape
    cells = blocks.reshape(piece.layers, down, across, m, n).swapaxes(2, 3)
    return cells.reshape(piece.layers, down * m, across * n)


def _join(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
