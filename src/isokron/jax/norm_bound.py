"""A lower bound of the spectral norm of many matrices at once, by power steps on a few probes."""

import jax
import jax.numpy as jnp

from isokron.white_kron import POWER_STEPS


def norm_bound(matrix: jax.Array, top: jax.Array, probes: jax.Array) -> jax.Array:
    """‖A‖₂ from below, for symmetric or skew A. [b, n, n], top: [b], probes: [k, n] → [b]

    V₀ = a + rms(a)·probes with a the row of A of largest energy; V ← VA/‖VA‖ row by row, six
    times; then max ‖VA‖. `top` is the largest entry by size, of which a symmetric positive A has
    one on its diagonal: A is divided by it, so that nothing overflows. A = 0 has bound 0.
    """
    # A itself stays as it is: dividing the few probes costs less than dividing the matrix
    scale = jnp.where(top > 0, 1 / jnp.where(top > 0, top, 1), 0)[:, None, None]
    energy = jnp.sum(jnp.square(matrix * scale), axis=2)  # [b, n]
    chosen = jnp.argmax(energy, axis=1)[:, None] == jnp.arange(matrix.shape[1])  # [b, n]
    row = jnp.sum(jnp.where(chosen[:, :, None], matrix * scale, 0), axis=1)[:, None, :]
    vectors = row + jnp.sqrt(jnp.mean(jnp.square(row), axis=2, keepdims=True)) * probes

    def power(_: int, vectors: jax.Array) -> jax.Array:
        vectors = jnp.einsum("bki,bij->bkj", vectors, matrix) * scale
        norm = _norm(vectors)
        return vectors / jnp.where(norm > 0, norm, 1)

    # a loop, because unrolled steps would be most of what is compiled
    vectors = jax.lax.fori_loop(0, POWER_STEPS, power, vectors)
    vectors = jnp.einsum("bki,bij->bkj", vectors, matrix) * scale
    return jnp.max(_norm(vectors)[:, :, 0], axis=1) * top


def _norm(vectors: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(vectors), axis=2, keepdims=True))
