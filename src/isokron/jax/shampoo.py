"""Shampoo: one factor a dimension, each an inverse root (Gupta et al., 1802.09568)."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from isokron.exponents import Exponent, check_root, exponents
from isokron.jax import linalg, moments
from isokron.jax.blocks import BlockBatch, Settings
from isokron.jax.learning_rate import with_learning_rate
from isokron.jax.linalg import across, inverse_power, multiply
from isokron.jax.settings import ShampooSettings, Static, is_zero, settle
from isokron.jax.transform import Gradients, Method, State, scale_by_preconditioned


def scale_by_shampoo(
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float = 0.95,
    damping: float = 1e-4,
    deficient: str = "relative",
    exponent: Exponent | Static = Static(2),
    form: str = "root",
    solver: str = "eigh",
    statistic: str = "gradient",
    graft: str | None = "adam",
    every: int = 10,
    start: int | None = 2,
    max_dim: int | Static | None = Static(256),
    **shared: Unpack[ShampooSettings],
) -> optax.GradientTransformationExtraArgs:
    """P = M̂ ×_1 A_1 … ×_k A_k, A_i = (F̂_i + εI)^(−1/p), F_i the second moment along dimension i.

    Args:
        betas: rates of the first moment M and of the second moment of grafting.
        factor_beta: rate of F; 1 sums as AdaGrad does.
        damping: ε.
        deficient: ε is "relative" to the mean eigenvalue, or absolute by "lift"; "pseudo", with
            ε = 0, is the pseudo-inverse.
        exponent: p; a number, or {order of a block: number or one a dimension}; 0 leaves a
            dimension alone, None is twice the order, as first published.
        form: "root" keeps A, "eigen" eigenvalues and eigenvectors of F.
        solver: of roots, "eigh", or "newton" or "higher", which use matrix products only.
        statistic: "gradient", or "kl": F of gradients that the other sides have preconditioned
            (KL-Shampoo, 2509.03378), the mean over columns; "kl_sum" is the sum.
        graft: whose step length to take: None, "sgd", "adagrad", "rmsprop" or "adam".
        every: steps from one refresh to the next.
        start: the first refresh, followed by one at each doubling below `every`.
        max_dim: longer dimensions are cut into blocks of at most this size.
        **shared: see ShampooSettings.
    """
    settings = settle("Shampoo", locals(), ShampooSettings)
    _check(settings)
    return scale_by_preconditioned(SHAMPOO, settings)


shampoo = with_learning_rate(scale_by_shampoo)


def _check(settings: Settings) -> None:
    """What settings must be beside others."""
    form, tolerance, solver = settings["form"], settings["tolerance"], settings["solver"]
    if form == "root" and not is_zero(tolerance):
        raise ValueError(
            f"tolerance must be 0 for form='root', got {tolerance!r}; only form='eigen' keeps the "
            "basis that it is about"
        )
    if form == "eigen" and solver != "eigh":
        raise ValueError(f"solver must be 'eigh' for form='eigen', got {solver!r}")
    damping = settings["damping"] if isinstance(settings["damping"], (int, float)) else 0.0
    for order in range(1, 5):
        for root in filter(None, exponents(settings, order)):
            check_root(root, damping, solver=solver, deficient=settings["deficient"])


def _init(batch: BlockBatch, dtype: Any, settings: Settings) -> State:
    roots = exponents(settings, len(batch.shape))
    sides = [i for i, root in enumerate(roots) if root]
    state = moments.zero_covariances(batch, sides, dtype, settings)
    for i in sides:
        identity = linalg.eyes(batch.rows, batch.shape[i], dtype)
        if settings["form"] == "root":
            state[f"root.{i}"] = identity
        else:
            # the eigenvalue whose damped root is 1
            one = {"lift": 1 - settings["damping"], "relative": 1 / (1 + settings["damping"])}
            value = one.get(settings["deficient"], 1.0)
            state[f"values.{i}"] = jnp.full_like(identity[..., 0], value)
            state[f"basis.{i}"] = identity
    return state


def _observe(grads: Gradients, state: State, settings: Settings) -> State:
    statistic, beta, covariances = settings["statistic"], settings["factor_beta"], {}
    for i in moments.sides_of(state):
        plain = statistic == "gradient"
        white = grads.grad if plain else _applied(grads.grad, state, settings, but=i)
        mean = statistic == "kl"
        covariances[f"cov.{i}"] = moments.observe_side(state, white, i, beta, mean=mean)
    return covariances


def _refresh(grads: Gradients, state: State, settings: Settings) -> State:
    roots, operators = exponents(settings, grads.grad.ndim - 1), {}
    for i in moments.sides_of(state):
        cov = moments.debiased_side(state, i, settings["factor_beta"], grads.step)
        if settings["form"] == "root":
            operators[f"root.{i}"] = linalg.inverse_root(
                cov, roots[i], settings["damping"], settings["solver"], settings["deficient"]
            )
        else:
            values, basis = _decomposed(cov, state[f"basis.{i}"], settings)
            operators |= {f"values.{i}": values, f"basis.{i}": basis}
    return moments.where_observed(operators, state)


def _decomposed(cov: jax.Array, old: jax.Array, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and eigenvectors; a basis that still fits gets only new eigenvalues."""
    if is_zero(settings["tolerance"]):
        return linalg.eigh(cov)
    cov = cov.astype(jnp.promote_types(cov.dtype, old.dtype))
    basis = old.astype(cov.dtype)
    stale = ~(linalg.offdiagonal(cov, basis) <= settings["tolerance"])
    values = jnp.sum(basis * (cov @ basis), axis=-2)

    def renew() -> tuple[jax.Array, jax.Array]:
        fresh_values, fresh_basis = linalg.eigh(cov)
        fresh_values = jnp.where(across(stale, values), fresh_values, values)
        return fresh_values, jnp.where(across(stale, basis), fresh_basis, basis)

    return jax.lax.cond(stale.any(), renew, lambda: (values, basis))


def _direction(grads: Gradients, state: State, settings: Settings) -> tuple[jax.Array, State]:
    return _applied(grads.moment, state, settings), {}


def _applied(x: jax.Array, state: State, settings: Settings, but: int | None = None) -> jax.Array:
    """x ×_i A_i over all sides i but one. [B, ...]"""
    for i in moments.sides_of(state):
        if i == but:
            continue
        if settings["form"] == "root":
            x = multiply(x, state[f"root.{i}"], i)
        else:
            root, basis = exponents(settings, x.ndim - 1)[i], state[f"basis.{i}"]
            values, deficient = state[f"values.{i}"], settings["deficient"]
            powers = inverse_power(values, root, settings["damping"], deficient)
            x = multiply(multiply(x, basis.mT, i) * linalg.along(powers, x, i), basis, i)
    return x


SHAMPOO = Method(_init, _direction, _observe, _refresh, operator=("root", "values", "basis"))
