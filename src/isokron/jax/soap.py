"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al., 2409.11321)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from isokron.jax.checks import check_choice
from isokron.jax.descent import descend
from isokron.jax.eigen import eigenbasis, follow, offdiagonal
from isokron.jax.moments import bias, filtered, first_moment, mixed
from isokron.jax.preconditioned import Method, scale_by_preconditioned
from isokron.jax.settings import Static, check_factors, check_not_negative, is_zero, settled
from isokron.jax.sides import (
    State,
    across,
    eyes,
    multiply,
    observed,
    preconditioned_sides,
    sides_of,
    zero_covariances,
)

Group = Mapping[str, Any]


def scale_by_soap(
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float | None = None,
    basis: str = "qr",
    tolerance: float = 0.0,
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
    """P = Q[(QᵀM̂) ⊘ (√Ê + ε)], E the second moment of QᵀG, Q the eigenbases of Shampoo's factors.

    The arguments are those of isokron.SOAP; see docs/jax.md. `stacked` may be a tree of numbers.
    """
    group = settled("SOAP", locals())
    check_choice("basis", group["basis"], ("qr", "eigh"))
    check_factors(group)
    check_not_negative("tolerance", group["tolerance"])
    return scale_by_preconditioned(SOAP, group)


def soap(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float | None = None,
    basis: str = "qr",
    tolerance: float = 0.0,
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
    """scale_by_soap, then decayed weights, then the learning rate.

    `weight_decay_mask`: a tree of flags, or a function of the parameters: which of them decay.
    """
    return descend(scale_by_soap, locals())


def _init(rows: int, shape: tuple[int, ...], dtype: Any, group: Group) -> State:
    sides = preconditioned_sides(shape, group)
    return {
        "rotated": jnp.zeros((rows, *shape), dtype),  # the first moment, in the basis
        "variance": jnp.zeros((rows, *shape), dtype),  # of the gradient in the basis
        **zero_covariances(rows, shape, sides, dtype, group),
        **{f"basis.{i}": eyes(rows, shape[i], dtype) for i in sides},
    }


def _observe(grad: jax.Array, state: State, step: jax.Array, group: Group) -> State:
    beta = group["betas"][1] if group["factor_beta"] is None else group["factor_beta"]
    return {f"cov.{i}": observed(state[f"cov.{i}"], grad, i, beta) for i in sides_of(state)}


def _refresh(state: State, order: int, step: jax.Array, group: Group) -> State:
    return {f"basis.{i}": _turned(state, i, group) for i in sides_of(state)}


def _turned(state: State, side: int, group: Group) -> jax.Array:
    """The new basis of a side. [B, d, d]"""
    cov, old = state[f"cov.{side}"], state[f"basis.{side}"]
    cov = cov.astype(jnp.promote_types(cov.dtype, old.dtype))
    old = old.astype(cov.dtype)
    # a basis that was never refreshed is the identity, from which one iteration leads nowhere
    new = (jnp.diagonal(old, axis1=-2, axis2=-1) == 1).all(axis=-1)
    if group["basis"] == "eigh":
        basis = eigenbasis(cov)
    else:
        near = follow(cov, old)
        basis = jax.lax.cond(
            new.any(), lambda: jnp.where(across(new, cov), eigenbasis(cov), near), lambda: near
        )
    if is_zero(group["tolerance"]):
        return basis
    fits = ~new & (offdiagonal(cov, old) <= group["tolerance"])
    return jnp.where(across(fits, cov), old, basis)


def _install(fresh: State, state: State) -> State:
    """What lives in the basis turns with it: R = Q_oldᵀ Q_new, M ← RᵀM, E ← (R⊙R)ᵀE.

    The last is exact for a permutation, and for uncorrelated coordinates.
    """
    rotated, variance = state["rotated"], state["variance"]
    for key, basis in fresh.items():
        side = int(key[6:])
        turn = basis.mT @ state[key]
        rotated = multiply(rotated, turn, side)
        variance = multiply(variance, jnp.square(turn), side)
    return {"rotated": rotated, "variance": variance, **fresh}


def _direction(
    grad: jax.Array, state: State, step: jax.Array, group: Group
) -> tuple[jax.Array, State]:
    (beta1, beta2), beta3 = group["betas"], group["beta3"]
    turned = grad
    for i in sides_of(state):
        turned = multiply(turned, state[f"basis.{i}"].mT, i)
    variance = mixed(state["variance"], turned * turned, beta2)
    if beta3 is not None:
        moment, rotated = filtered(state["rotated"], turned, beta1, beta3, step)
    else:
        moment, rotated = first_moment(state["rotated"], turned, beta1, False, step)
    direction = moment / (jnp.sqrt(variance / bias(beta2, step)) + group["eps"])
    for i in sides_of(state):
        direction = multiply(direction, state[f"basis.{i}"], i)
    return direction, {"rotated": rotated, "variance": variance}


SOAP = Method(
    _init,
    _observe,
    _refresh,
    _direction,
    _install,
    operator=("basis", "rotated", "variance"),
    keeps_moment=True,
)
