"""Exponential means of gradients, their bias, and grafting onto a simple method's step length."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from isokron.jax.linalg import across, nonzero, norms

Number = Any  # a Python number, or a scalar array


def bias(beta: Number, step: jax.Array) -> jax.Array:
    """1 − βᵗ, the total weight of a mean that started at zero t steps ago. [...]

    By expm1: in float32 the plain form is off by 1e-5 at β = 0.999, t = 1.
    """
    positive = isinstance(beta, (int, float)) and beta > 0
    rate = math.log(beta) if positive else jnp.log(beta)
    return jnp.where(step > 0, -jnp.expm1(step * rate), 0)


def mixed(old: jax.Array, new: jax.Array, beta: Number) -> jax.Array:
    """β old + (1−β) new"""
    return beta * old + (1 - beta) * new


def debiased(mean: jax.Array, beta: Number, step: jax.Array) -> jax.Array:
    """mean / (1 − βᵗ), t one number a block. [B, ...], [B]"""
    return mean / across(bias(beta, step), mean)


def first_moment(
    mean: jax.Array, grad: jax.Array, beta: Number, nesterov: bool, step: jax.Array | None
) -> jax.Array:
    """M or, with Nesterov, (1−β)G + βM, debiased where `step` is given. `mean`: M with G in it."""
    moment = mixed(mean, grad, beta) if nesterov else mean
    # Nesterov's look-ahead weighs the gradients as one step later: (1−β) + β(1−βᵗ) = 1 − βᵗ⁺¹
    if step is not None:
        moment = debiased(moment, beta, step + 1 if nesterov else step)
    return moment


def adam(
    grad: jax.Array, mu: jax.Array, nu: jax.Array, step: jax.Array, settings: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m̂ / (√v̂ + ε), and the moments m and v it is made of. [B, ...], step: [B]"""
    beta1, beta2 = settings["betas"]
    mu, nu = mixed(mu, grad, beta1), mixed(nu, grad * grad, beta2)
    deviation = jnp.sqrt(debiased(nu, beta2, step)) + settings["eps"]
    return debiased(mu, beta1, step) / deviation, mu, nu


def heavy_ball(
    velocity: jax.Array, update: jax.Array, settings: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """B or, with Nesterov, P + μB; and B ← μB + P."""
    rate = settings["momentum"]
    velocity = rate * velocity + update
    return (update + rate * velocity if settings["nesterov"] else velocity), velocity


def graft_direction(
    grad: jax.Array,
    moment: jax.Array,
    second: jax.Array | None,
    step: jax.Array,
    settings: Mapping[str, Any],
) -> tuple[jax.Array, jax.Array | None]:
    """D = m for SGD, else m / (√v + ε): AdaGrad's sum, RMSprop's mean, Adam's debiased mean; and v.

    All: [B, ...], step: [B].
    """
    if second is None:
        return moment, None
    kind, beta2 = settings["graft"], settings["betas"][1]
    square = grad * grad
    second = second + square if kind == "adagrad" else mixed(second, square, beta2)
    variance = debiased(second, beta2, step) if kind == "adam" else second
    return moment / (jnp.sqrt(variance) + settings["eps"]), second


def graft(direction: jax.Array, length_of: jax.Array) -> jax.Array:
    """P · ‖D‖ / ‖P‖, block by block: one method's direction at another's step length. [B, ...]

    Agarwal et al., 2002.11803.
    """
    peak, norm = norms(direction)
    simple_peak, simple_norm = norms(length_of)
    unit = direction / across(nonzero(peak), direction)
    return unit * across(simple_norm / nonzero(norm) * simple_peak, direction)
