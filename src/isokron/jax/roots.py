"""Inverse roots (A + εI)^(−1/p) of symmetric positive matrices, by eigenvalues or by products.

As isokron.linalg.roots has them, where the reasons for the constants are.
"""

from typing import Any

import jax
import jax.numpy as jnp

from isokron.jax.eigen import eigh, power_of_two

LEAST = 1e-30
ORDERS = {"newton": 2, "higher": 3}
MAX_STEPS = 100
BASIN = 0.1
TOLERANCE = 1e-3


def inverse_root(
    matrix: jax.Array, root: float, damping: Any, *, solver: str = "eigh", deficient: str = "lift"
) -> jax.Array:
    """(A + εI)^(−1/p), p = `root`, ε = `damping`. A: [..., n, n]; NaN where there is none.

    "eigh" treats eigenvalues as `inverse_power` does. "newton" and "higher" are products alone,
    for accelerators: they need an integer p and A + εI positive definite, and lift nothing.
    """
    if solver != "eigh":
        diagonal = jnp.diagonal(matrix, axis1=-2, axis2=-1)
        added = damping if deficient == "lift" else _unit(diagonal, damping)[..., None]
        return _coupled(matrix, int(root), added, ORDERS[solver])
    values, basis = eigh(matrix)
    powers = inverse_power(values, root, damping, deficient)
    return (basis * powers[..., None, :]) @ basis.mT


def inverse_power(
    values: jax.Array, root: float, damping: Any, deficient: str = "lift"
) -> jax.Array:
    """λ^(−1/p) of the eigenvalues of positive matrices, which rounding may have moved. [..., n]

    "relative": as "lift", with ε in units of the mean eigenvalue.
    "lift":   (λ − min(λmin, 0) + ε)^(−1/p): a shift takes the least eigenvalue to at least ε.
    "pseudo": λ^(−1/p), and 0 where λ ≤ n·eps·λmax.
    """
    if deficient != "pseudo":
        lowest = jnp.minimum(jnp.min(values, axis=-1, keepdims=True), 0)
        added = damping if deficient == "lift" else _unit(values, damping)
        return (values - lowest + added) ** (-1 / root)
    rtol = values.shape[-1] * float(jnp.finfo(values.dtype).eps)
    threshold = jnp.maximum(rtol * jnp.max(values, axis=-1, keepdims=True), 0)
    return jnp.where(values <= threshold, 0, values ** (-1 / root))  # NaN stays NaN


def _unit(values: jax.Array, damping: Any) -> jax.Array:
    """ε times the mean eigenvalue, which is the mean of the diagonal. [..., n] → [..., 1]"""
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    least = jnp.where(damping > 0, LEAST, 0)
    return jnp.maximum(damping * jnp.mean(wide, axis=-1, keepdims=True), least)


def _coupled(matrix: jax.Array, root: int, damping: Any, order: int) -> jax.Array:
    """X ← X q(E), M ← q(E)ᵖ M, E = I − M, from X = z^(1/p) I, M = zA: M → I and X → A^(−1/p).

    q is the Taylor polynomial of (1 − E)^(−1/p) with `order` terms; two are Newton's.
    N. Higham, Functions of Matrices, ch. 7.
    """
    lower = jnp.tril(matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32)))
    eye = jnp.eye(lower.shape[-1], dtype=lower.dtype)
    full = lower + jnp.tril(lower, -1).mT + damping * eye
    scale = power_of_two(jnp.max(jnp.abs(full), axis=(-2, -1), keepdims=True))
    full = full / scale
    bound = jnp.minimum(  # two upper bounds of the largest eigenvalue
        jnp.linalg.norm(full, axis=(-2, -1), keepdims=True),
        jnp.max(jnp.sum(jnp.abs(full), axis=-1, keepdims=True), axis=-2, keepdims=True),
    )

    def distance(m: jax.Array) -> jax.Array:
        return jnp.linalg.norm(m - eye, axis=(-2, -1), keepdims=True)

    def step(state: Any) -> Any:
        count, x, m, error, active = state
        factor = _taylor(eye - m, eye, root, order)
        next_x, next_m = x @ factor, jnp.linalg.matrix_power(factor, root) @ m
        next_error = distance(next_m)
        # outside the basin the error may stand still for long, while small eigenvalues grow
        going = next_error < jnp.where(error < BASIN, error / 2, error * 2)
        taken = active & (going | (next_error < error))
        x, m = jnp.where(taken, next_x, x), jnp.where(taken, next_m, m)
        return count + 1, x, m, jnp.where(taken, next_error, error), active & going

    first = full / bound
    error = distance(first)
    _, x, _, error, _ = jax.lax.while_loop(
        lambda state: (state[0] < MAX_STEPS) & jnp.any(state[-1]),
        step,
        (jnp.int32(0), eye * bound ** (-1 / root), first, error, error > 0),
    )
    x = (x + x.mT) / 2 * scale ** (-1 / root)
    return jnp.where(error <= TOLERANCE, x, jnp.nan)


def _taylor(gap: jax.Array, eye: jax.Array, root: int, order: int) -> jax.Array:
    """Σ_k c_k Eᵏ for k < order, c_k = c_{k−1} (1/p + k − 1)/k: (1 − E)^(−1/p), truncated."""
    coefficients = [1.0]
    for k in range(1, order):
        coefficients.append(coefficients[-1] * (1 / root + k - 1) / k)
    total = coefficients[-1] * gap
    for c in reversed(coefficients[1:-1]):  # Horner
        total = (total + c * eye) @ gap
    return total + eye
