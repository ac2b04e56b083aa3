"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al., 2409.11321)."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from isokron.jax import moments
from isokron.jax.blocks import BlockBatch, Settings
from isokron.jax.learning_rate import with_learning_rate
from isokron.jax.linalg import across, eigh, eyes, follow, multiply, nonzero, offdiagonal
from isokron.jax.settings import FactorSettings, Static, is_zero, settle
from isokron.jax.transform import Gradients, Method, State, scale_by_preconditioned

LEAST = 1e-4  # of the mean eigenvalue, as in isokron.optim.soap


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
        max_dim: longer dimensions are cut into blocks of at most this size.
        **shared: see FactorSettings.
    """
    return scale_by_preconditioned(SOAP, settle("SOAP", locals(), FactorSettings))


soap = with_learning_rate(scale_by_soap)


def _init(batch: BlockBatch, dtype: Any, settings: Settings) -> State:
    zeros = jnp.zeros((batch.rows, *batch.shape), dtype)
    return {
        "rotated": zeros,  # the first moment, in the basis
        "variance": zeros,  # of the gradient in the basis
        **moments.zero_covariances(batch, range(len(batch.shape)), dtype, settings),
        **{f"basis.{i}": eyes(batch.rows, size, dtype) for i, size in enumerate(batch.shape)},
    }


def _observe(grads: Gradients, state: State, settings: Settings) -> State:
    beta, sides = settings["factor_beta"], moments.sides_of(state)
    beta = settings["betas"][1] if beta is None else beta
    return {f"cov.{i}": moments.observe_side(state, grads.grad, i, beta) for i in sides}


def _refresh(grads: Gradients, state: State, settings: Settings) -> State:
    bases = {f"basis.{i}": _refreshed_basis(state, i, settings) for i in moments.sides_of(state)}
    return moments.where_observed(bases, state)


def _refreshed_basis(state: State, side: int, settings: Settings) -> jax.Array:
    """The new basis of a side, the largest eigenvalue's vector first. [B, d, d]"""
    cov, old = state[f"cov.{side}"], state[f"basis.{side}"]
    cov = cov.astype(jnp.promote_types(cov.dtype, old.dtype))
    old = old.astype(cov.dtype)
    # a basis that was never refreshed is the identity, from which one iteration leads nowhere
    first = (jnp.diagonal(old, axis1=-2, axis2=-1) == 1).all(axis=-1)
    if settings["basis"] == "eigh":
        basis = eigh(cov)[1][..., ::-1]
    else:
        near = follow(cov, old)
        basis = jax.lax.cond(
            first.any(),
            lambda: jnp.where(across(first, cov), eigh(cov)[1][..., ::-1], near),
            lambda: near,
        )
    if is_zero(settings["tolerance"]):
        return basis
    fits = ~first & (offdiagonal(cov, old) <= settings["tolerance"])
    return jnp.where(across(fits, cov), old, basis)


def _install(bases: State, state: State, settings: Settings) -> State:
    """Turn what lives in the basis with it: R = Q_oldᵀQ_new, M ← RᵀM, E ← (R⊙R)ᵀE, mended.

    See isokron.optim.soap.
    """
    rotated, variance = state["rotated"], state["variance"]
    for key, basis in bases.items():
        side, old, cov = int(key[6:]), state[key], state[f"cov.{key[6:]}"]
        turn = basis.mT @ old
        squares = jnp.square(turn)
        sums = squares @ _diagonal(cov, old)
        scale = jnp.where(sums > 0, _diagonal(cov, basis) / nonzero(sums), 1)
        rotated = multiply(rotated, turn, side)
        variance = multiply(variance, squares * scale, side)
    beta1, beta2 = settings["betas"]
    # 1 − β₁²/β₂; 0: there is no bound on M²/E
    room = jnp.maximum(beta2 - beta1 * beta1, 0) / jnp.maximum(beta2, 1e-30)
    least = room * (1 - beta2) / (1 - beta1) ** 2 * jnp.square(rotated)
    variance = jnp.maximum(variance, least.astype(variance.dtype))
    return {"rotated": rotated, "variance": variance, **bases}


def _diagonal(cov: jax.Array, basis: jax.Array) -> jax.Array:
    """Of QᵀFQ, and at least LEAST of its mean. [B, d, 1]"""
    wide = basis.astype(jnp.promote_types(cov.dtype, basis.dtype))
    values = jnp.sum(wide * (cov.astype(wide.dtype) @ wide), axis=-2)[..., None]
    return jnp.maximum(values, LEAST * values.mean(axis=-2, keepdims=True)).astype(basis.dtype)


def _direction(grads: Gradients, state: State, settings: Settings) -> tuple[jax.Array, State]:
    beta1, beta2 = settings["betas"]
    turned = grads.grad
    for i in moments.sides_of(state):
        turned = multiply(turned, state[f"basis.{i}"].mT, i)
    variance = moments.mixed(state["variance"], turned * turned, beta2)
    rotated = moments.mixed(state["rotated"], turned, beta1)
    deviation = jnp.sqrt(moments.debiased(variance, beta2, grads.step)) + settings["eps"]
    ratio = moments.beta3_ratio(settings)
    direction = moments.blend(rotated, turned, beta1, ratio, grads.step) / deviation
    for i in moments.sides_of(state):
        direction = multiply(direction, state[f"basis.{i}"], i)
    return direction, {"rotated": rotated, "variance": variance}


OPERATOR = ("basis", "rotated", "variance")
SOAP = Method(_init, _direction, _observe, _refresh, _install, operator=OPERATOR, keeps_moment=True)
