"""Exponential means of what has been seen, and what to divide a young one by."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Number = Any  # a Python number, or an array that is one


def bias(beta: Number, step: jax.Array) -> jax.Array:
    """1 − βᵗ, the weight a mean that started at zero has gathered in t steps.

    By expm1: in float32 the plain form is off by 1e-5 at β = 0.999, t = 1.
    """
    known = isinstance(beta, (int, float)) and beta > 0
    rate = math.log(beta) if known else jnp.log(beta)
    return jnp.where(step > 0, -jnp.expm1(step * rate), 0)


def mixed(old: jax.Array, new: jax.Array, beta: Number) -> jax.Array:
    """β old + (1−β) new"""
    return beta * old + (1 - beta) * new


def first_moment(
    mean: jax.Array, grad: jax.Array, beta: Number, nesterov: bool, step: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """M or, with Nesterov, (1−β)G + βM, debiased where `step` is given; and M ← βM + (1−β)G."""
    mean = mixed(mean, grad, beta)
    moment = mixed(mean, grad, beta) if nesterov else mean
    # Nesterov's look-ahead weighs the gradients as one step later: (1−β) + β(1−βᵗ) = 1 − βᵗ⁺¹
    if step is not None:
        moment = moment / bias(beta, step + 1 if nesterov else step)
    return moment, mean


def filtered(
    mean: jax.Array, grad: jax.Array, beta: Number, beta3: Number, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """f = β₃M + (1−β₃)G over 1 − β₃β₁ᵗ⁻¹; and M ← β₁M + (1−β₁)G. β₃ = β₁: Adam's mean."""
    weight = 1 - beta3 + beta3 * bias(beta, step - 1)
    return mixed(mean, grad, beta3) / weight, mixed(mean, grad, beta)


def adam(
    grad: jax.Array, mu: jax.Array, nu: jax.Array, step: jax.Array, group: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m̂ / (√v̂ + ε), and the moments m and v it is made of."""
    beta1, beta2 = group["betas"]
    mu, nu = mixed(mu, grad, beta1), mixed(nu, grad * grad, beta2)
    deviation = jnp.sqrt(nu / bias(beta2, step)) + group["eps"]
    return mu / bias(beta1, step) / deviation, mu, nu


def heavy_ball(
    velocity: jax.Array, update: jax.Array, group: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """B or, with Nesterov, (1−d)P + μB; and B ← μB + (1−d)P."""
    rate, share = group["momentum"], 1 - group["dampening"]
    velocity = rate * velocity + share * update
    return (share * update + rate * velocity if group["nesterov"] else velocity), velocity
