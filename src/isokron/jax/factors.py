"""One step of a factor Q toward whitening: Quad's and Skew's, dense and diagonal."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from isokron.jax.norm_bound import norm_bound

Step = Callable[[jax.Array, jax.Array, float, jax.Array, jax.Array], jax.Array]
DiagonalStep = Callable[[jax.Array, jax.Array, float, jax.Array], jax.Array]


class Method(NamedTuple):
    """(Q, T, t₂, plr/L, probes) → Q, and the same without probes where Q is diagonal.

    `symmetric`: whether Q stays symmetric, which makes QᵀQ = QQ.
    """

    dense: Step
    diagonal: DiagonalStep
    symmetric: bool


def quad_dense(
    factor: jax.Array, gram: jax.Array, target: float, rate: jax.Array, probes: jax.Array
) -> jax.Array:
    """Q ← (P + Pᵀ)/2, P = MQM with M = I − z(T − t₂I), z = plr/2L. [b, n, n]"""
    z = (rate / 2)[:, None, None]
    once = (1 + z * target) * factor - z * jnp.einsum("bij,bjk->bik", gram, factor)
    twice = (1 + z * target) * once - z * jnp.einsum("bij,bjk->bik", once, gram)
    return (twice + jnp.swapaxes(twice, 1, 2)) / 2


def quad_diagonal(
    factor: jax.Array, gram: jax.Array, target: float, rate: jax.Array
) -> jax.Array:
    """Q ← Q(1 − z(T − t₂))², z = plr/2L. [b, n]"""
    return factor * jnp.square(1 - (rate / 2)[:, None] * (gram - target))


def skew_dense(
    factor: jax.Array, gram: jax.Array, target: float, rate: jax.Array, probes: jax.Array
) -> jax.Array:
    """Q ← procrustes(MQ), M = I − z(T − t₂I), z = plr/L. [b, n, n]"""
    z = rate[:, None, None]
    moved = (1 + z * target) * factor - z * jnp.einsum("bij,bjk->bik", gram, factor)
    return procrustes(moved, probes)


def skew_diagonal(
    factor: jax.Array, gram: jax.Array, target: float, rate: jax.Array
) -> jax.Array:
    """Q ← Q(1 − z(T − t₂)), z = plr/L. [b, n]"""
    return factor * (1 - rate[:, None] * (gram - target))


def procrustes(factor: jax.Array, probes: jax.Array) -> jax.Array:
    """Q ← Q + a(RQ + ½aRRQ), R = (Qᵀ − Q)/max|Qᵀ − Q|: turns Q toward symmetric positive.

    a = (1/8)/‖R‖, and no more than −tr(RQ)/tr(RRQ), where tr(RQ) is largest along the turn.
    """
    generator = jnp.swapaxes(factor, 1, 2) - factor
    top = jnp.max(jnp.abs(generator), axis=(1, 2))
    safe = jnp.where(top > 0, top, 1)
    generator = generator / safe[:, None, None]
    turned = jnp.einsum("bij,bjk->bik", generator, factor)
    twice = jnp.einsum("bij,bjk->bik", generator, turned)
    slope = jnp.einsum("bii->b", turned)
    bend = jnp.einsum("bii->b", twice)
    norm = norm_bound(generator, jnp.where(top > 0, 1.0, 0.0).astype(top.dtype), probes)
    angle = 1 / (8 * jnp.where(norm > 0, norm, 1))
    angle = jnp.where(bend < 0, jnp.minimum(angle, -slope / jnp.where(bend < 0, bend, -1)), angle)
    angle = jnp.where(slope > 0, angle, 0)[:, None, None]
    return factor + angle * (turned + angle / 2 * twice)


def balance(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What to multiply Ql and Qr by, so that max|Ql| = max|Qr| and P stays. [b], [b]"""
    sizes = [jnp.max(jnp.abs(each), axis=tuple(range(1, each.ndim))) for each in (left, right)]
    known = (sizes[0] > 0) & (sizes[1] > 0)
    ratio = jnp.where(known, sizes[1] / jnp.where(known, sizes[0], 1), 1)
    return jnp.sqrt(ratio), 1 / jnp.sqrt(ratio)


QUAD = Method(quad_dense, quad_diagonal, symmetric=True)
SKEW = Method(skew_dense, skew_diagonal, symmetric=False)
