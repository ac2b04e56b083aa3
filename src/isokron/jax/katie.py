"""Katie: diagonal variances times Kronecker correlations."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from isokron.exponents import Exponent, exponents
from isokron.jax import moments
from isokron.jax.blocks import BlockBatch, Settings
from isokron.jax.learning_rate import with_learning_rate
from isokron.jax.linalg import eyes, inverse_root, multiply
from isokron.jax.settings import FactorSettings, Static, settle
from isokron.jax.transform import Gradients, Method, State, scale_by_preconditioned


def scale_by_katie(
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    factor_beta: float = 0.95,
    damping: float = 1e-2,
    exponent: Exponent | Static = Static(2),
    form: str = "sequential",
    statistic: str = "correlation",
    graft: str | None = None,
    every: int = 10,
    start: int | None = 2,
    max_dim: int | Static | None = Static(256),
    **shared: Unpack[FactorSettings],
) -> optax.GradientTransformationExtraArgs:
    """Δ = (M̂ ⊘ S) ×_i (K̂_i + λI)^(−1/p), scaled to the norm of M̂ ⊘ S; S = √V̂ + ε.

    Args:
        betas: rates of the first moment M and of the variances V.
        factor_beta: rate of the correlations K_i of G ⊘ S along dimension i.
        damping: λ; it has no unit, because the mean eigenvalue of K_i is about one.
        exponent: p; a number, or {order of a block: number or one a dimension}; 0 leaves a
            dimension alone, None is twice the order.
        form: "sequential", or "symmetric", which divides by √S before and after.
        statistic: "correlation", or "raw": factors of G itself, to compare with.
        graft: whose step length to take: None, "sgd", "adagrad", "rmsprop" or "adam".
        every: steps from one refresh to the next.
        start: the first refresh, followed by one at each doubling below `every`.
        max_dim: longer dimensions are cut into blocks of at most this size.
        **shared: see FactorSettings.
    """
    settings = settle("Katie", locals(), FactorSettings)
    for order in range(1, 5):
        exponents(settings, order)
    return scale_by_preconditioned(KATIE, settings)


katie = with_learning_rate(scale_by_katie)


def _init(batch: BlockBatch, dtype: Any, settings: Settings) -> State:
    powers = exponents(settings, len(batch.shape))
    sides = [i for i, power in enumerate(powers) if power]
    return {
        "variance": jnp.zeros((batch.rows, *batch.shape), dtype),
        **moments.zero_covariances(batch, sides, dtype, settings),
        **{f"root.{i}": eyes(batch.rows, batch.shape[i], dtype) for i in sides},
    }


def _observe(grads: Gradients, state: State, settings: Settings) -> State:
    grad, beta = grads.grad, settings["factor_beta"]
    variance = moments.mixed(state["variance"], grad * grad, settings["betas"][1])
    if settings["statistic"] == "correlation":
        grad = grad / _deviation(variance, grads.step, settings)
    sides = moments.sides_of(state)
    covariances = {f"cov.{i}": moments.observe_side(state, grad, i, beta, mean=True) for i in sides}
    return {"variance": variance, **covariances}


def _refresh(grads: Gradients, state: State, settings: Settings) -> State:
    powers, roots = exponents(settings, grads.grad.ndim - 1), {}
    for i in moments.sides_of(state):
        cov = moments.debiased_side(state, i, settings["factor_beta"], grads.step)
        roots[f"root.{i}"] = inverse_root(cov, powers[i], settings["damping"])
    return moments.where_observed(roots, state)


def _direction(grads: Gradients, state: State, settings: Settings) -> tuple[jax.Array, State]:
    deviation = _deviation(state["variance"], grads.step, settings)
    adam = grads.moment / deviation
    scale = jax.lax.rsqrt(deviation) if settings["form"] == "symmetric" else None
    white = adam if scale is None else scale * grads.moment
    for i in moments.sides_of(state):
        white = multiply(white, state[f"root.{i}"], i)
    return moments.graft(white if scale is None else scale * white, adam), {}


def _deviation(variance: jax.Array, step: jax.Array, settings: Settings) -> jax.Array:
    """S = √V̂ + ε. [B, ...]"""
    # without ε, an entry that has never had a gradient would be 0/0
    least = jnp.maximum(settings["eps"], jnp.finfo(variance.dtype).tiny)
    return jnp.sqrt(moments.debiased(variance, settings["betas"][1], step)) + least


KATIE = Method(_init, _direction, _observe, _refresh, operator=("root",))
