"""P G = QlᵀQl G QrᵀQr for a batch of equal blocks, and Q learned from what comes out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isokron.jax.factors import Method
from isokron.jax.norm_bound import norm_bound
from isokron.white_kron import SQUARE_LIMIT, Bucket

Probes = Callable[[int], jax.Array]


class Side(NamedTuple):
    """One side of a batch of blocks: Q, [b, n, n] or [b, n], and L, which bounds its steps, [b]."""

    factor: jax.Array
    lipschitz: jax.Array


Sides = tuple[Side, ...]


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


def whiten(blocks: jax.Array, sides: Sides, method: Method) -> jax.Array:
    """P G. [b, m, n] or [b, n]"""
    for axis, (factor, _) in enumerate(sides, 1):
        if factor.ndim == 2:
            other = tuple({*range(1, blocks.ndim)} - {axis})
            blocks = blocks * jnp.expand_dims(jnp.square(factor), other)
        elif axis == 1:
            blocks = jnp.einsum("bij,bjn->bin", factor, blocks)
            # a symmetric Q is its own transpose, and products without one are quicker
            turned = "bij" if method.symmetric else "bji"
            blocks = jnp.einsum(f"{turned},bjn->bin", factor, blocks)
        else:
            turned = "bjk" if method.symmetric else "bkj"
            blocks = jnp.einsum(f"bmj,{turned}->bmk", blocks, factor)
            blocks = jnp.einsum("bmj,bjk->bmk", blocks, factor)
    return blocks


def learn(
    white: jax.Array,
    sides: Sides,
    method: Method,
    rate: jax.Array,
    probes: Probes,
    limit: jax.typing.ArrayLike,
) -> tuple[Sides, jax.Array]:
    """Sides after one step on PG, and which blocks showed anything at all: [b].

    T = PG(PG)ᵀ, t₂ = n on the left; T = (PG)ᵀPG, t₂ = m on the right. ℓ = ‖T‖₂ + t₂ and
    L ← max(0.95L + 0.05ℓ, ℓ); then the method's step of length plr/L.
    """
    within = tuple(range(1, white.ndim))
    largest = jnp.max(jnp.abs(white), axis=within)
    white = white * jnp.expand_dims(
        SQUARE_LIMIT / jnp.maximum(largest, SQUARE_LIMIT), within
    )
    moved = []
    for axis, (factor, lipschitz) in enumerate(sides, 1):
        target = float(white.shape[3 - axis]) if white.ndim == 3 else 1.0
        dense = factor.ndim == 3
        if dense:
            gram = jnp.einsum("bmj,bnj->bmn" if axis == 1 else "bjm,bjn->bmn", white, white)
            top = jnp.max(jnp.diagonal(gram, axis1=1, axis2=2), axis=1)
            size = norm_bound(gram, top, probes(factor.shape[-1]))
        else:
            gram = jnp.sum(jnp.square(white), axis=tuple({*within} - {axis}))
            size = jnp.max(gram, axis=1)
        steepness = size + target
        lipschitz = jnp.maximum(0.95 * lipschitz + 0.05 * steepness, steepness)
        if dense:
            factor = method.dense(factor, gram, target, rate / lipschitz, probes(factor.shape[-1]))
        else:
            factor = method.diagonal(factor, gram, target, rate / lipschitz)
        moved.append(Side(jnp.clip(factor, -limit, limit), lipschitz))
    return tuple(moved), largest > 0
