"""P G = QlᵀQl G QrᵀQr for a batch of equal blocks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isokron.white_kron import Bucket


class Side(NamedTuple):
    """One side of a batch of blocks: Q, [b, n, n] or [b, n], and L, which bounds its steps, [b]."""

    factor: jax.Array
    lipschitz: jax.Array


Sides = tuple[Side, ...]
Factors = dict[str, Sides]  # by the name of a bucket
Batches = dict[str, jax.Array]


def first_sides(
    bucket: Bucket, rows: int, scale: jax.typing.ArrayLike, stored: Any, work: Any
) -> Sides:
    """Q = scale·I in the dtype it is stored in, L = 0 in the one that is worked in."""
    sides = []
    for size, dense in zip(bucket.shape, bucket.dense, strict=True):
        one = jnp.eye(size) if dense else jnp.ones(size)
        factor = jnp.broadcast_to((scale * one).astype(stored), (rows, *one.shape))
        sides.append(Side(factor, jnp.zeros(rows, work)))
    return tuple(sides)


def whiten(blocks: jax.Array, sides: Sides, symmetric: bool) -> jax.Array:
    """P G. [b, m, n] or [b, n]. A symmetric Q is its own transpose, whose products are quicker."""
    for axis, (factor, _) in enumerate(sides, 1):
        if factor.ndim == 2:
            other = tuple({*range(1, blocks.ndim)} - {axis})
            blocks = blocks * jnp.expand_dims(jnp.square(factor), other)
        elif axis == 1:
            blocks = jnp.einsum("bij,bjn->bin", factor, blocks)
            blocks = jnp.einsum("bij,bjn->bin" if symmetric else "bji,bjn->bin", factor, blocks)
        else:
            blocks = jnp.einsum("bmj,bjk->bmk" if symmetric else "bmj,bkj->bmk", blocks, factor)
            blocks = jnp.einsum("bmj,bjk->bmk", blocks, factor)
    return blocks


def scaled(array: jax.Array, scale: jax.Array) -> jax.Array:
    """Each block times its number. [b, ...], [b]"""
    return array * jnp.expand_dims(scale, tuple(range(1, array.ndim)))
