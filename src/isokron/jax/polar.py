"""The polar factor of a matrix: U Vᵀ where the matrix is U S Vᵀ."""

from typing import Any

import jax
import jax.numpy as jnp

from isokron.jax.eigen import power_of_two
from isokron.polynomials import Choice, schedule


def newton_schulz(
    matrix: jax.Array,
    steps: int = 5,
    coefficients: Choice | None = None,
    dtype: Any = None,
    eps: float = 1e-7,
) -> jax.Array:
    """X ← aX + (bA + cA²)X with A = XXᵀ, from X₀ = matrix/‖matrix‖, `steps` times. [..., m, n]

    `coefficients`: a name in isokron.polynomials.POLYNOMIALS, one triple for all steps, or one
    triple a step; None is "classic". `dtype`: of the iteration; by default bfloat16 on accelerators
    and at least float32 on CPU. No gradient flows through.
    """
    matrix = jax.lax.stop_gradient(jnp.asarray(matrix))
    if matrix.ndim < 2:
        raise ValueError(f"newton_schulz needs matrices [..., m, n], got shape {matrix.shape}")
    if not jnp.issubdtype(matrix.dtype, jnp.floating):
        raise ValueError(f"newton_schulz needs real floating-point matrices, got {matrix.dtype}")
    triples = schedule(coefficients, steps)
    if matrix.size == 0:
        return matrix
    wide = jnp.promote_types(matrix.dtype, jnp.float32)
    if dtype is None:
        dtype = wide if jax.default_backend() == "cpu" else jnp.bfloat16
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).astype(wide)  # A = XXᵀ is then on the short side
    # a power of two rounds nothing; without it the norm of a finite matrix may overflow
    x = (x / power_of_two(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))).astype(dtype)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), eps).astype(dtype)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).astype(matrix.dtype)
