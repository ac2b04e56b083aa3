"""Shampoo: one factor a dimension, each an inverse root (Gupta et al., 1802.09568).

And the statistics of these factors, "cov.0", "cov.1", … in the state, which SOAP and Katie share:
F_i ← β F_i + (1−β) X_(i) X_(i)ᵀ, X_(i) the block with dimension i as rows; a plain sum at β = 1.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from isokron.exponents import Exponent, check_root, exponents
from isokron.jax.blocks import BlockBatch, Settings
from isokron.jax.linalg import (
    across,
    along,
    eigh,
    eyes,
    inverse_power,
    inverse_root,
    multiply,
    offdiagonal,
)
from isokron.jax.moments import bias
from isokron.jax.settings import (
    ShampooSettings,
    Static,
    check_choice,
    check_factor_beta,
    check_not_negative,
    is_zero,
    settle,
    with_learning_rate,
)
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
            (KL-Shampoo, 2509.03378).
        graft: whose step length to take: None, "sgd", "adagrad", "rmsprop" or "adam".
        every: steps from one refresh to the next.
        start: the first refresh, followed by one at each doubling below `every`.
        max_dim: longer dimensions are cut into blocks of this size.
        **shared: see ShampooSettings.
    """
    settings = settle("Shampoo", locals(), ShampooSettings)
    _check(settings)
    return scale_by_preconditioned(SHAMPOO, settings)


shampoo = with_learning_rate(scale_by_shampoo)


def _check(settings: Settings) -> None:
    check_choice("form", settings["form"], ("root", "eigen"))
    check_choice("statistic", settings["statistic"], ("gradient", "kl"))
    check_factor_beta(settings, sums=True)
    check_not_negative("damping", settings["damping"])
    if settings["form"] == "root" and not is_zero(settings["tolerance"]):
        raise ValueError(
            f"tolerance must be 0 for form='root', got {settings['tolerance']!r}; only "
            "form='eigen' keeps the basis that it is about"
        )
    if settings["solver"] != "eigh" and settings["form"] == "eigen":
        raise ValueError(f"solver must be 'eigh' for form='eigen', got {settings['solver']!r}")
    damping = settings["damping"] if isinstance(settings["damping"], (int, float)) else 0.0
    for order in range(1, 5):
        for root in filter(None, exponents(settings, order)):
            check_root(root, damping, solver=settings["solver"], deficient=settings["deficient"])


def zero_covariances(
    batch: BlockBatch, sides: Iterable[int], dtype: Any, settings: Settings
) -> State:
    stored = settings["factor_dtype"] or dtype
    return {
        f"cov.{i}": jnp.zeros((batch.rows, batch.shape[i], batch.shape[i]), stored) for i in sides
    }


def sides_of(state: Mapping[str, jax.Array]) -> list[int]:
    """The dimensions that have a factor."""
    return sorted(int(key[4:]) for key in state if key.startswith("cov."))


def observe_side(
    cov: jax.Array, x: jax.Array, side: int, beta: Any, scale: float = 1.0
) -> jax.Array:
    """Fold one side of x, [B, ...], into its covariance. [B, d, d]"""
    x = jnp.moveaxis(x.astype(cov.dtype), side + 1, 1)
    rows = x.reshape(*x.shape[:2], -1)
    weight = scale * jnp.where(beta < 1, 1 - beta, 1)
    return (beta * cov + weight * (rows @ rows.mT)).astype(cov.dtype)


def debiased_side(state: State, side: int, beta: Any, step: jax.Array) -> jax.Array:
    """F̂ = F/(1−βᵗ). [B, d, d]"""
    cov = state[f"cov.{side}"]
    return cov / across(jnp.where(beta < 1, bias(beta, step), 1).astype(cov.dtype), cov)


def where_observed(operators: State, state: State) -> State:
    """The new operators of blocks that have had a gradient; the others keep theirs. [B, ...]"""
    result = {}
    for key, value in operators.items():
        cov = state[f"cov.{key.rpartition('.')[2]}"]
        observed = jnp.trace(cov, axis1=-2, axis2=-1) != 0
        result[key] = jnp.where(across(observed, value), value.astype(state[key].dtype), state[key])
    return result


def _init(batch: BlockBatch, dtype: Any, settings: Settings) -> State:
    roots = exponents(settings, len(batch.shape))
    sides = [i for i, root in enumerate(roots) if root]
    state = zero_covariances(batch, sides, dtype, settings)
    for i in sides:
        identity = eyes(batch.rows, batch.shape[i], dtype)
        if settings["form"] == "root":
            state[f"root.{i}"] = identity
        else:
            # the eigenvalue whose damped root is 1
            one = {"lift": 1 - settings["damping"], "relative": 1 / (1 + settings["damping"])}
            state[f"values.{i}"] = jnp.full_like(
                identity[..., 0], one.get(settings["deficient"], 1.0)
            )
            state[f"basis.{i}"] = identity
    return state


def _observe(shown: Gradients, state: State, count: jax.Array, settings: Settings) -> State:
    grad, covariances = shown.grad, {}
    for i in sides_of(state):
        white, scale = grad, 1.0
        if settings["statistic"] == "kl":
            white = _applied(grad, state, settings, but=i)
            scale = grad.shape[i + 1] / prod(grad.shape[1:])
        covariances[f"cov.{i}"] = observe_side(
            state[f"cov.{i}"], white, i, settings["factor_beta"], scale
        )
    return covariances


def _refresh(shown: Gradients, state: State, count: jax.Array, settings: Settings) -> State:
    roots, operators = exponents(settings, shown.grad.ndim - 1), {}
    for i in sides_of(state):
        cov = debiased_side(state, i, settings["factor_beta"], shown.step)
        if settings["form"] == "root":
            operators[f"root.{i}"] = inverse_root(
                cov,
                roots[i],
                settings["damping"],
                solver=settings["solver"],
                deficient=settings["deficient"],
            )
        else:
            values, basis = _decomposed(cov, state[f"basis.{i}"], settings)
            operators |= {f"values.{i}": values, f"basis.{i}": basis}
    return where_observed(operators, state)


def _decomposed(cov: jax.Array, old: jax.Array, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and eigenvectors; a basis that still fits gets only new eigenvalues."""
    if is_zero(settings["tolerance"]):
        return eigh(cov)
    cov = cov.astype(jnp.promote_types(cov.dtype, old.dtype))
    basis = old.astype(cov.dtype)
    stale = ~(offdiagonal(cov, basis) <= settings["tolerance"])
    values = jnp.sum(basis * (cov @ basis), axis=-2)

    def renew() -> tuple[jax.Array, jax.Array]:
        fresh_values, fresh_basis = eigh(cov)
        fresh_values = jnp.where(across(stale, values), fresh_values, values)
        return fresh_values, jnp.where(across(stale, basis), fresh_basis, basis)

    return jax.lax.cond(stale.any(), renew, lambda: (values, basis))


def _direction(
    shown: Gradients, state: State, count: jax.Array, settings: Settings
) -> tuple[jax.Array, State]:
    return _applied(shown.moment, state, settings), {}


def _applied(x: jax.Array, state: State, settings: Settings, but: int | None = None) -> jax.Array:
    """x ×_i A_i over all sides i but one. [B, ...]"""
    for i in sides_of(state):
        if i == but:
            continue
        if settings["form"] == "root":
            x = multiply(x, state[f"root.{i}"], i)
        else:
            root = exponents(settings, x.ndim - 1)[i]
            powers = inverse_power(
                state[f"values.{i}"], root, settings["damping"], settings["deficient"]
            )
            turned = multiply(x, state[f"basis.{i}"].mT, i)
            x = multiply(turned * along(powers, turned, i), state[f"basis.{i}"], i)
    return x


SHAMPOO = Method(
    init=_init,
    direction=_direction,
    observe=_observe,
    refresh=_refresh,
    operator=("root", "values", "basis"),
)
