"""A lower bound of the spectral norm of many matrices at once, by power steps on a few probes."""

import jax
import jax.numpy as jnp

from isokron.white_kron import POWER_STEPS


def norm_bound(matrix: jax.Array, scale: jax.Array, probes: jax.Array) -> jax.Array:
    """‖A‖₂ from below, for symmetric or skew A. [b, n, n], scale: [b], probes: [k, n] → [b]

    V₀ = a + rms(a)·probes with a the row of A of largest energy; V ← VA/‖VA‖ row by row, six
    times; then max ‖VA‖. All of it on A/scale, whose squares must neither over- nor underflow:
    any number near the entries will do. A = 0 has bound 0.
    """
    tiny = jnp.finfo(matrix.dtype).tiny
    # A itself stays as it is: dividing the few probes costs less than dividing the matrix
    inverse = (1 / jnp.maximum(scale, tiny))[:, None, None]
    energy = jnp.sum(jnp.square(matrix * inverse), axis=2)  # [b, n]
    chosen = jnp.argmax(energy, axis=1)[:, None] == jnp.arange(matrix.shape[1])  # [b, n]
    row = jnp.einsum("bi,bij->bj", chosen.astype(matrix.dtype), matrix)[:, None, :] * inverse
    vectors = row + jnp.sqrt(jnp.mean(jnp.square(row), axis=2, keepdims=True)) * probes

    def power(_: int, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        vectors = jnp.einsum("bki,bij->bkj", found[0], matrix) * inverse
        norms = jnp.sqrt(jnp.sum(jnp.square(vectors), axis=2, keepdims=True))
        return vectors / jnp.maximum(norms, tiny), norms

    # a loop, because unrolled steps would be most of what is compiled; so the last product is in it
    norms = jnp.zeros_like(vectors[:, :, :1])
    _, norms = jax.lax.fori_loop(0, POWER_STEPS + 1, power, (vectors, norms))
    return jnp.max(norms[:, :, 0], axis=1) * scale
