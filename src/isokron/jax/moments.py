"""Exponential means of gradients, of their squares and of covariances; bias correction; grafting.

Shampoo, SOAP and Katie have the covariance of each dimension i in their state, as "cov.i":
F_i ← β F_i + (1−β) X_(i) X_(i)ᵀ, X_(i) the block with dimension i as rows; a plain sum at β = 1.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from isokron.jax.blocks import BlockBatch, Settings
from isokron.jax.linalg import across, nonzero, norms

State = Mapping[str, jax.Array]
Number = Any  # a Python number, or a scalar array


def bias(beta: Number, step: jax.Array) -> jax.Array:
    """1 − βᵗ, the total weight of a mean that started at zero t steps ago. [...]"""
    # by expm1: in float32 the plain form is off by 1e-5 at β = 0.999, t = 1
    positive = isinstance(beta, (int, float)) and beta > 0
    rate = math.log(beta) if positive else jnp.log(beta)
    return jnp.where(step > 0, -jnp.expm1(step * rate), 0)


def mixed(old: jax.Array, new: jax.Array, beta: Number) -> jax.Array:
    """β old + (1−β) new"""
    return beta * old + (1 - beta) * new


def debiased(mean: jax.Array, beta: Number, step: jax.Array) -> jax.Array:
    """mean / (1 − βᵗ), t one number a block. [B, ...], [B]"""
    return mean / across(bias(beta, step), mean)


def blend(mean: jax.Array, grad: jax.Array, beta: Number, ratio: Number, step: Any) -> jax.Array:
    """β₃M₋ + (1−β₃)G, debiased, M₋ the mean before this gradient. [B, ...]

    `ratio`: β₃/β; 1 is the mean itself, and β is Nesterov's look-ahead, (1−β)G + βM.
    """
    if isinstance(ratio, (int, float)) and ratio == 1:
        return debiased(mean, beta, step)
    # gradients weigh (1−β₃) + β₃(1−βᵗ⁻¹) = 1 − (β₃/β)βᵗ
    return debiased(mixed(mean, grad, ratio), beta, step + jnp.log(ratio) / jnp.log(beta))


def beta3_ratio(settings: Settings) -> Number:
    """β₃/β₁, by which Shampoo, SOAP and Katie blend their first moment."""
    beta3 = settings["beta3"]
    return 1 if beta3 is None else beta3 / settings["betas"][0]


def adam(
    grad: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    step: jax.Array,
    live: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m̂ / (√v̂ + ε) and the moments m and v; 0 and the old ones where not `live`. step, live: [B]"""
    (beta1, beta2), live = settings["betas"], across(live, grad)
    grad = jnp.where(live, grad, 0)
    new_mu, new_nu = mixed(mu, grad, beta1), mixed(nu, grad * grad, beta2)
    deviation = jnp.sqrt(debiased(new_nu, beta2, step)) + settings["eps"]
    direction = jnp.where(live, debiased(new_mu, beta1, step) / deviation, 0)
    return direction, jnp.where(live, new_mu, mu), jnp.where(live, new_nu, nu)


def graft(direction: jax.Array, length_of: jax.Array) -> jax.Array:
    """P · ‖D‖ / ‖P‖, block by block: one method's direction at another's step length. [B, ...]

    Agarwal et al., 2002.11803.
    """
    peak, norm = norms(direction)
    simple_peak, simple_norm = norms(length_of)
    unit = direction / across(nonzero(peak), direction)
    return unit * across(simple_norm / nonzero(norm) * simple_peak, direction)


def zero_covariances(
    batch: BlockBatch, sides: Iterable[int], dtype: Any, settings: Settings
) -> dict[str, jax.Array]:
    shapes = {i: (batch.rows, batch.shape[i], batch.shape[i]) for i in sides}
    stored = settings["factor_dtype"] or dtype
    return {f"cov.{i}": jnp.zeros(shape, stored) for i, shape in shapes.items()}


def sides_of(state: State) -> list[int]:
    """The dimensions that have a factor."""
    return sorted(int(key[4:]) for key in state if key.startswith("cov."))


def observe_side(state: State, x: jax.Array, side: int, beta: Any, mean: bool = False) -> jax.Array:
    """Fold one side of x, [B, ...], into its covariance; `mean`: over the columns of X_(i)."""
    cov, x = state[f"cov.{side}"], jnp.moveaxis(x, side + 1, 1)
    rows = x.reshape(*x.shape[:2], -1).astype(cov.dtype)
    weight = jnp.where(beta < 1, 1 - beta, 1) / (rows.shape[2] if mean else 1)
    return (beta * cov + weight * (rows @ rows.mT)).astype(cov.dtype)


def debiased_side(state: State, side: int, beta: Any, step: jax.Array) -> jax.Array:
    """F̂ = F/(1−βᵗ). [B, d, d]"""
    cov = state[f"cov.{side}"]
    return cov / across(jnp.where(beta < 1, bias(beta, step), 1).astype(cov.dtype), cov)


def where_observed(operators: State, state: State) -> dict[str, jax.Array]:
    """The new operators of blocks that have had a gradient; the others keep theirs. [B, ...]"""
    result = {}
    for key, value in operators.items():
        cov = state[f"cov.{key.rpartition('.')[2]}"]
        observed = jnp.trace(cov, axis1=-2, axis2=-1) != 0
        result[key] = jnp.where(across(observed, value), value.astype(state[key].dtype), state[key])
    return result
