"""Eigenvectors of symmetric matrices, and eigenbases that follow a slowly changing one."""

import jax
import jax.numpy as jnp


def eigh(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A = Q diag(λ) Qᵀ, λ ascending. A: [..., n, n], of which only the lower triangle is read.

    Half precision is computed and returned in float32. NaN where A is not finite.
    """
    lower = jnp.tril(matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32)))
    peak = jnp.max(jnp.abs(lower), axis=(-2, -1), keepdims=True)
    finite = jnp.isfinite(peak)
    scale = power_of_two(jnp.where(finite, peak, 1))
    # no backend is to see what is not finite: some never return
    clean = jnp.where(finite, lower / scale, 0)
    vectors, values = jax.lax.linalg.eigh(clean, lower=True, symmetrize_input=False)
    values = jnp.where(finite[..., 0], values * scale[..., 0], jnp.nan)
    return values, jnp.where(finite, vectors, jnp.nan)


def power_of_two(peak: jax.Array) -> jax.Array:
    """The power of two with peak/power in [1, 2): dividing by it rounds nothing. 0 gives tiny."""
    peak = jnp.maximum(peak, jnp.finfo(peak.dtype).tiny)
    return peak / (2 * jnp.frexp(peak)[0])


def eigenbasis(matrix: jax.Array) -> jax.Array:
    """Eigenvectors, the largest eigenvalue's first. [..., n, n], only the lower triangle is read"""
    return jnp.flip(eigh(matrix)[1], -1)


def follow(matrix: jax.Array, basis: jax.Array) -> jax.Array:
    """One orthogonal iteration, Q ← QR(AQ), columns by descending Rayleigh quotient. [..., n, n]

    In that order every column is freed of the larger ones and the iteration converges to the
    eigenvectors; in ascending order it does not (SOAP: 2409.11321).
    """
    peak = jnp.max(jnp.diagonal(matrix, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    known = peak > 0  # a matrix of zeros says nothing about its eigenvectors
    image = matrix @ basis / jnp.where(known, peak, 1)
    quotients = jnp.sum(basis * image, axis=-2, keepdims=True)
    order = jnp.argsort(quotients, axis=-1, descending=True, stable=True)
    turned, _ = jnp.linalg.qr(jnp.take_along_axis(image, order, axis=-1))
    return jnp.where(known, turned, basis)


def offdiagonal(matrix: jax.Array, basis: jax.Array) -> jax.Array:
    """‖QᵀAQ without its diagonal‖ / ‖A‖: how far a basis is from diagonalising. [...]"""
    peak = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    turned = basis.mT @ (matrix / jnp.where(peak > 0, peak, 1)) @ basis
    outside = jnp.where(jnp.eye(basis.shape[-1], dtype=bool), 0, turned)
    total = jnp.linalg.norm(turned, axis=(-2, -1))
    tiny = jnp.finfo(turned.dtype).tiny
    return jnp.linalg.norm(outside, axis=(-2, -1)) / jnp.maximum(total, tiny)
