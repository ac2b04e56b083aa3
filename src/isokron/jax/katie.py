"""Katie: diagonal variances times Kronecker correlations."""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from isokron.exponents import Exponent, exponents
from isokron.jax.checks import check_choice
from isokron.jax.descent import descend
from isokron.jax.grafting import graft as grafted
from isokron.jax.moments import bias, mixed
from isokron.jax.preconditioned import Method, scale_by_preconditioned
from isokron.jax.roots import inverse_root
from isokron.jax.settings import Static, check_above_zero, check_factors, settled
from isokron.jax.sides import (
    State,
    debiased,
    eyes,
    multiply,
    observed,
    preconditioned_sides,
    sides_of,
    zero_covariances,
)

Group = Mapping[str, Any]


def scale_by_katie(
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float = 0.95,
    damping: float = 1e-2,
    exponent: Exponent | Static = Static(2),
    form: str = "sequential",
    statistic: str = "correlation",
    factor_dtype: Any = None,
    graft: str | None = None,
    graft_by: str = "block",
    every: int = 10,
    start: int | None = 2,
    max_dim: int | Static | None = Static(256),
    oversize: str = "cut",
    vectors: bool = False,
    stacked: Any = Static(0),
    split: tuple[int, ...] | int | None = None,
    split_dim: int | Static = Static(0),
    momentum: float | Static = Static(0.0),
    dampening: float = 0.0,
    nesterov: bool = False,
    beta3: float | None = None,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Δ = (M̂ ⊘ S) ×_i (K̂_i + λI)^(−1/p), scaled to the norm of M̂ ⊘ S; S = √V̂ + ε.

    The arguments are those of isokron.Katie; see docs/jax.md. `stacked` may be a tree of numbers.
    """
    group = settled("Katie", locals())
    check_choice("form", group["form"], ("sequential", "symmetric"))
    check_choice("statistic", group["statistic"], ("correlation", "raw"))
    check_factors(group)
    check_above_zero("damping", group["damping"])
    for order in range(1, 5):
        exponents(group, order)
    return scale_by_preconditioned(KATIE, group)


def katie(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float = 0.95,
    damping: float = 1e-2,
    exponent: Exponent | Static = Static(2),
    form: str = "sequential",
    statistic: str = "correlation",
    factor_dtype: Any = None,
    graft: str | None = None,
    graft_by: str = "block",
    weight_decay: float = 0.1,
    weight_decay_mask: Any = None,
    every: int = 10,
    start: int | None = 2,
    max_dim: int | Static | None = Static(256),
    oversize: str = "cut",
    vectors: bool = False,
    stacked: Any = Static(0),
    split: tuple[int, ...] | int | None = None,
    split_dim: int | Static = Static(0),
    momentum: float | Static = Static(0.0),
    dampening: float = 0.0,
    nesterov: bool = False,
    beta3: float | None = None,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """scale_by_katie, then decayed weights, then the learning rate.

    `weight_decay_mask`: a tree of flags, or a function of the parameters: which of them decay.
    """
    return descend(scale_by_katie, locals())


def _init(rows: int, shape: tuple[int, ...], dtype: Any, group: Group) -> State:
    powers = exponents(group, len(shape))
    sides = [i for i in preconditioned_sides(shape, group) if powers[i]]
    return {
        "variance": jnp.zeros((rows, *shape), dtype),
        **zero_covariances(rows, shape, sides, dtype, group),
        **{f"root.{i}": eyes(rows, shape[i], dtype) for i in sides},
    }


def _observe(grad: jax.Array, state: State, step: jax.Array, group: Group) -> State:
    variance = mixed(state["variance"], grad * grad, group["betas"][1])
    correlated = group["statistic"] == "correlation"
    seen = grad / _deviation(variance, step, group) if correlated else grad
    covs = {}
    for i in sides_of(state):
        scale = grad.shape[i + 1] / prod(grad.shape[1:])
        covs[f"cov.{i}"] = observed(state[f"cov.{i}"], seen, i, group["factor_beta"], scale)
    return {"variance": variance, **covs}


def _refresh(state: State, order: int, step: jax.Array, group: Group) -> State:
    powers, fresh = exponents(group, order), {}
    for i in sides_of(state):
        cov = debiased(state, i, group["factor_beta"], step)
        fresh[f"root.{i}"] = inverse_root(cov, powers[i], group["damping"])
    return fresh


def _direction(
    moment: jax.Array, state: State, step: jax.Array, group: Group
) -> tuple[jax.Array, State]:
    deviation = _deviation(state["variance"], step, group)
    adam = moment / deviation
    scale = jax.lax.rsqrt(deviation) if group["form"] == "symmetric" else None
    white = adam if scale is None else scale * moment
    for i in sides_of(state):
        white = multiply(white, state[f"root.{i}"], i)
    return grafted(white if scale is None else scale * white, adam), {}


def _deviation(variance: jax.Array, step: jax.Array, group: Group) -> jax.Array:
    """S = √V̂ + ε. [B, ...]"""
    # without ε, an entry that has never had a gradient would be 0/0
    tiny = jnp.finfo(variance.dtype).tiny
    return jnp.sqrt(variance / bias(group["betas"][1], step)) + jnp.maximum(group["eps"], tiny)


KATIE = Method(_init, _observe, _refresh, _direction, operator=("root",))
