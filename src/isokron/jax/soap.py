"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al., 2409.11321)."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from isokron.jax.blocks import BlockBatch, Settings
from isokron.jax.linalg import across, eigenbasis, eyes, follow, multiply, offdiagonal
from isokron.jax.moments import debiased, mixed
from isokron.jax.settings import (
    FactorSettings,
    Static,
    check_choice,
    check_factor_beta,
    is_zero,
    settle,
    with_learning_rate,
)
from isokron.jax.shampoo import observe_side, sides_of, where_observed, zero_covariances
from isokron.jax.transform import Gradients, Method, State, scale_by_preconditioned


def scale_by_soap(
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float | None = None,
    basis: str = "qr",
    tolerance: float = 0.0,
    graft: str | None = "adam",
    every: int = 10,
    start: int | None = 2,
    max_dim: int | Static | None = Static(256),
    **shared: Unpack[FactorSettings],
) -> optax.GradientTransformationExtraArgs:
    """P = Q[(QᵀM̂) ⊘ (√Ê + ε)], E the second moment of QᵀG, Q the eigenbases of Shampoo's factors.

    Args:
        betas: rates of the two moments, which are kept in the basis.
        factor_beta: rate of the factors; betas[1] by default.
        basis: how Q is refreshed after its first time: by one "qr" iteration, or by "eigh".
        tolerance: relative off-diagonal error up to which a basis is not refreshed.
        graft: whose step length to take: None, as published, "sgd", "adagrad", "rmsprop" or "adam".
        every: steps from one refresh to the next.
        start: the first refresh, followed by one at each doubling below `every`.
        max_dim: longer dimensions are cut into blocks of this size.
        **shared: see FactorSettings.
    """
    settings = settle("SOAP", locals(), FactorSettings)
    check_choice("basis", settings["basis"], ("qr", "eigh"))
    check_factor_beta(settings)
    return scale_by_preconditioned(SOAP, settings)


soap = with_learning_rate(scale_by_soap)


def _init(batch: BlockBatch, dtype: Any, settings: Settings) -> State:
    zeros = jnp.zeros((batch.rows, *batch.shape), dtype)
    return {
        "rotated": zeros,  # the first moment, in the basis
        "variance": zeros,  # of the gradient in the basis
        **zero_covariances(batch, range(len(batch.shape)), dtype, settings),
        **{f"basis.{i}": eyes(batch.rows, size, dtype) for i, size in enumerate(batch.shape)},
    }


def _observe(shown: Gradients, state: State, count: jax.Array, settings: Settings) -> State:
    beta = settings["factor_beta"]
    beta = settings["betas"][1] if beta is None else beta
    return {
        f"cov.{i}": observe_side(state[f"cov.{i}"], shown.grad, i, beta) for i in sides_of(state)
    }


def _refresh(shown: Gradients, state: State, count: jax.Array, settings: Settings) -> State:
    return where_observed(
        {f"basis.{i}": _refreshed_basis(state, i, settings) for i in sides_of(state)}, state
    )


def _refreshed_basis(state: State, side: int, settings: Settings) -> jax.Array:
    """The new basis of a side. [B, d, d]"""
    cov, old = state[f"cov.{side}"], state[f"basis.{side}"]
    cov = cov.astype(jnp.promote_types(cov.dtype, old.dtype))
    old = old.astype(cov.dtype)
    # a basis that was never refreshed is the identity, from which one iteration leads nowhere
    first = (jnp.diagonal(old, axis1=-2, axis2=-1) == 1).all(axis=-1)
    if settings["basis"] == "eigh":
        basis = eigenbasis(cov)
    else:
        near = follow(cov, old)
        basis = jax.lax.cond(
            first.any(), lambda: jnp.where(across(first, cov), eigenbasis(cov), near), lambda: near
        )
    if is_zero(settings["tolerance"]):
        return basis
    fits = ~first & (offdiagonal(cov, old) <= settings["tolerance"])
    return jnp.where(across(fits, cov), old, basis)


def _install(bases: State, state: State) -> State:
    """Turn what lives in the basis with it: R = Q_oldᵀ Q_new, M ← RᵀM, E ← (R⊙R)ᵀE.

    The last is exact for a permutation, and for uncorrelated coordinates.
    """
    rotated, variance = state["rotated"], state["variance"]
    for key, basis in bases.items():
        side = int(key[6:])
        turn = basis.mT @ state[key]
        rotated = multiply(rotated, turn, side)
        variance = multiply(variance, jnp.square(turn), side)
    return {"rotated": rotated, "variance": variance, **bases}


def _direction(
    shown: Gradients, state: State, count: jax.Array, settings: Settings
) -> tuple[jax.Array, State]:
    beta1, beta2 = settings["betas"]
    turned = shown.grad
    for i in sides_of(state):
        turned = multiply(turned, state[f"basis.{i}"].mT, i)
    variance = mixed(state["variance"], turned * turned, beta2)
    rotated = mixed(state["rotated"], turned, beta1)
    deviation = jnp.sqrt(debiased(variance, beta2, shown.step)) + settings["eps"]
    direction = debiased(rotated, beta1, shown.step) / deviation
    for i in sides_of(state):
        direction = multiply(direction, state[f"basis.{i}"], i)
    return direction, {"rotated": rotated, "variance": variance}


SOAP = Method(
    init=_init,
    direction=_direction,
    observe=_observe,
    refresh=_refresh,
    install=_install,
    operator=("basis", "rotated", "variance"),
    keeps_moment=True,
)
