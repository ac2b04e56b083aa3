"""Shampoo: one factor a dimension, each an inverse root (Gupta et al., 1802.09568)."""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from isokron.exponents import Exponent, check_root, exponents
from isokron.jax.checks import check_choice
from isokron.jax.descent import descend
from isokron.jax.eigen import eigh, offdiagonal
from isokron.jax.preconditioned import Method, scale_by_preconditioned
from isokron.jax.roots import inverse_power, inverse_root
from isokron.jax.settings import Static, check_factors, check_not_negative, is_zero, settled
from isokron.jax.sides import (
    State,
    across,
    along,
    debiased,
    eyes,
    multiply,
    observed,
    preconditioned_sides,
    sides_of,
    zero_covariances,
)

Group = Mapping[str, Any]


def scale_by_shampoo(
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float = 0.95,
    damping: float = 1e-4,
    deficient: str = "relative",
    exponent: Exponent | Static = Static(2),
    form: str = "root",
    solver: str = "eigh",
    tolerance: float = 0.0,
    statistic: str = "gradient",
    factor_dtype: Any = None,
    graft: str | None = "adam",
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
    """P = M̂ ×_1 A_1 … ×_k A_k, A_i = (F̂_i + εI)^(−1/p), F_i the second moment along dimension i.

    The arguments are those of isokron.Shampoo; see docs/jax.md. `stacked` may be a tree of numbers.
    """
    group = settled("Shampoo", locals())
    _check(group)
    return scale_by_preconditioned(SHAMPOO, group)


def shampoo(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float = 0.95,
    damping: float = 1e-4,
    deficient: str = "relative",
    exponent: Exponent | Static = Static(2),
    form: str = "root",
    solver: str = "eigh",
    tolerance: float = 0.0,
    statistic: str = "gradient",
    factor_dtype: Any = None,
    graft: str | None = "adam",
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
    """scale_by_shampoo, then decayed weights, then the learning rate.

    `weight_decay_mask`: a tree of flags, or a function of the parameters: which of them decay.
    """
    return descend(scale_by_shampoo, locals())


def _check(group: Group) -> None:
    check_choice("form", group["form"], ("root", "eigen"))
    check_choice("statistic", group["statistic"], ("gradient", "kl"))
    check_factors(group, sums=True)
    check_not_negative("damping", group["damping"])
    check_not_negative("tolerance", group["tolerance"])
    known = isinstance(group["tolerance"], (int, float))
    if group["form"] == "root" and known and group["tolerance"]:
        raise ValueError(
            f"tolerance must be 0 for form='root', got {group['tolerance']!r}; only form='eigen' "
            "keeps the basis that it is about"
        )
    if group["solver"] != "eigh" and group["form"] == "eigen":
        raise ValueError(f"solver must be 'eigh' for form='eigen', got {group['solver']!r}")
    damping = group["damping"] if isinstance(group["damping"], (int, float)) else 0.0
    for order in range(1, 5):
        for root in exponents(group, order):
            if root:
                check_root(root, damping, solver=group["solver"], deficient=group["deficient"])


def _init(rows: int, shape: tuple[int, ...], dtype: Any, group: Group) -> State:
    roots = exponents(group, len(shape))
    sides = [i for i in preconditioned_sides(shape, group) if roots[i]]
    state = zero_covariances(rows, shape, sides, dtype, group)
    for i in sides:
        if group["form"] == "root":
            state[f"root.{i}"] = eyes(rows, shape[i], dtype)
        else:
            one = {"lift": 1 - group["damping"], "relative": 1 / (1 + group["damping"])}
            values = one.get(group["deficient"], 1.0)  # of which, damped, every root is 1
            state[f"values.{i}"] = jnp.full((rows, shape[i]), values, dtype)
            state[f"basis.{i}"] = eyes(rows, shape[i], dtype)
    return state


def _observe(grad: jax.Array, state: State, step: jax.Array, group: Group) -> State:
    beta, seen = group["factor_beta"], {}
    for i in sides_of(state):
        white, scale = grad, 1.0
        if group["statistic"] == "kl":
            white = _applied(grad, state, group, but=i)
            scale = grad.shape[i + 1] / prod(grad.shape[1:])
        seen[f"cov.{i}"] = observed(state[f"cov.{i}"], white, i, beta, scale)
    return seen


def _refresh(state: State, order: int, step: jax.Array, group: Group) -> State:
    damping, deficient, fresh = group["damping"], group["deficient"], {}
    for i in sides_of(state):
        cov = debiased(state, i, group["factor_beta"], step)
        if group["form"] == "root":
            root = exponents(group, order)[i]
            fresh[f"root.{i}"] = inverse_root(
                cov, root, damping, solver=group["solver"], deficient=deficient
            )
        else:
            fresh[f"values.{i}"], fresh[f"basis.{i}"] = _decomposed(cov, i, state, group)
    return fresh


def _decomposed(
    cov: jax.Array, side: int, state: State, group: Group
) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and eigenvectors; a basis that still fits gets the newest eigenvalues."""
    if is_zero(group["tolerance"]):
        return eigh(cov)
    old = state[f"basis.{side}"]
    cov = cov.astype(jnp.promote_types(cov.dtype, old.dtype))
    basis = old.astype(cov.dtype)
    stale = ~(offdiagonal(cov, basis) <= group["tolerance"])
    values = jnp.sum(basis * (cov @ basis), axis=-2)

    def renew() -> tuple[jax.Array, jax.Array]:
        fresh_values, fresh_basis = eigh(cov)
        fresh_values = jnp.where(across(stale, values), fresh_values, values)
        return fresh_values, jnp.where(across(stale, basis), fresh_basis, basis)

    return jax.lax.cond(stale.any(), renew, lambda: (values, basis))


def _direction(
    moment: jax.Array, state: State, step: jax.Array, group: Group
) -> tuple[jax.Array, State]:
    return _applied(moment, state, group), {}


def _applied(x: jax.Array, state: State, group: Group, but: int | None = None) -> jax.Array:
    """x ×_i A_i over all sides i but one. [B, ...]"""
    for i in sides_of(state):
        if i == but:
            continue
        if group["form"] == "root":
            x = multiply(x, state[f"root.{i}"], i)
        else:
            root, values = exponents(group, x.ndim - 1)[i], state[f"values.{i}"]
            powers = inverse_power(values, root, group["damping"], group["deficient"])
            turned = multiply(x, state[f"basis.{i}"].mT, i)
            x = multiply(turned * along(powers, turned, i), state[f"basis.{i}"], i)
    return x


SHAMPOO = Method(_init, _observe, _refresh, _direction, operator=("root", "values", "basis"))
