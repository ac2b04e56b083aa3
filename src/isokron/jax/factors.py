"""One step of a factor Q toward whitening: Quad's and Skew's, dense and diagonal."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from isokron.jax.norm_bound import norm_bound


class Gram(NamedTuple):
    """T = WWᵀ, [b, n, n], and W, [b, n, k], where multiplying by it twice is cheaper, else None."""

    matrix: jax.Array
    root: jax.Array | None

    def times(self, factor: jax.Array) -> jax.Array:
        """T X"""
        if self.root is None:
            return jnp.einsum("bij,bjk->bik", self.matrix, factor)
        inner = jnp.einsum("bjk,bji->bki", self.root, factor)
        return jnp.einsum("bik,bkj->bij", self.root, inner)

    def after(self, factor: jax.Array) -> jax.Array:
        """X T"""
        if self.root is None:
            return jnp.einsum("bij,bjk->bik", factor, self.matrix)
        inner = jnp.einsum("bij,bjk->bik", factor, self.root)
        return jnp.einsum("bik,bjk->bij", inner, self.root)


class Method(NamedTuple):
    """(Q, T, t₂, plr/L, probes) → Q, and the same for a diagonal Q, without probes.

    T, t₂, plr/L: one a block. `symmetric`: whether Q stays so.
    """

    dense: Callable[[jax.Array, Gram, jax.Array, jax.Array, jax.Array], jax.Array]
    diagonal: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    symmetric: bool


def quad_dense(
    factor: jax.Array, gram: Gram, target: jax.Array, rate: jax.Array, probes: jax.Array
) -> jax.Array:
    """Q ← (P + Pᵀ)/2, P = MQM with M = I − z(T − t₂I), z = plr/2L. [b, n, n]"""
    z, grow = _coefficients(rate / 2, target)
    once = grow * factor - z * gram.times(factor)
    twice = grow * once - z * gram.after(once)
    return (twice + jnp.swapaxes(twice, 1, 2)) / 2


def quad_diagonal(
    factor: jax.Array, gram: jax.Array, target: jax.Array, rate: jax.Array
) -> jax.Array:
    """Q ← Q(1 − z(T − t₂))², z = plr/2L. [b, n]"""
    return factor * jnp.square(1 - (rate / 2)[:, None] * (gram - target[:, None]))


def skew_dense(
    factor: jax.Array, gram: Gram, target: jax.Array, rate: jax.Array, probes: jax.Array
) -> jax.Array:
    """Q ← procrustes(MQ), M = I − z(T − t₂I), z = plr/L. [b, n, n]"""
    z, grow = _coefficients(rate, target)
    return procrustes(grow * factor - z * gram.times(factor), probes)


def skew_diagonal(
    factor: jax.Array, gram: jax.Array, target: jax.Array, rate: jax.Array
) -> jax.Array:
    """Q ← Q(1 − z(T − t₂)), z = plr/L. [b, n]"""
    return factor * (1 - rate[:, None] * (gram - target[:, None]))


def _coefficients(z: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """z and 1 + z t₂, which make M X = (1 + z t₂) X − z T X."""
    return z[:, None, None], (1 + z * target)[:, None, None]


def procrustes(factor: jax.Array, probes: jax.Array) -> jax.Array:
    """Q ← Q + a(RQ + ½aRRQ), R = (Qᵀ − Q)/max|Qᵀ − Q|: turns Q toward symmetric positive.

    a = (1/8)/‖R‖, and no more than −tr(RQ)/tr(RRQ), where the trace of Q is largest. [b, n, n]
    """
    generator = jnp.swapaxes(factor, 1, 2) - factor
    top = jnp.max(jnp.abs(generator), axis=(1, 2))
    generator = generator / jnp.where(top > 0, top, 1)[:, None, None]
    turned = jnp.einsum("bij,bjk->bik", generator, factor)
    twice = jnp.einsum("bij,bjk->bik", generator, turned)
    # tr(RX) = Σ Rᵢⱼ Xⱼᵢ and Rᵢⱼ = −Rⱼᵢ
    slope = -jnp.sum(generator * factor, axis=(1, 2))
    bend = -jnp.sum(generator * turned, axis=(1, 2))
    norm = norm_bound(generator, jnp.ones_like(top), probes)
    angle = 1 / (8 * jnp.where(norm > 0, norm, 1))
    angle = jnp.where(bend < 0, jnp.minimum(angle, slope / jnp.where(bend < 0, -bend, 1)), angle)
    angle = jnp.where(slope > 0, angle, 0)[:, None, None]
    return factor + angle * (turned + angle / 2 * twice)


def balance(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What to multiply Ql and Qr by, so that max|Ql| = max|Qr| and P stays. [b], [b]"""
    sizes = [jnp.max(jnp.abs(each), axis=tuple(range(1, each.ndim))) for each in (left, right)]
    known = (sizes[0] > 0) & (sizes[1] > 0)
    scale = jnp.sqrt(jnp.where(known, sizes[1] / jnp.where(known, sizes[0], 1), 1))
    return scale, 1 / scale


QUAD = Method(quad_dense, quad_diagonal, symmetric=True)
SKEW = Method(skew_dense, skew_diagonal, symmetric=False)
