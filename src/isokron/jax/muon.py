"""Muon: the momentum, orthogonalized (K. Jordan et al., 2024; scale of 2502.16982)."""

from typing import Any, Unpack

import jax
import optax

from isokron.jax.blocks import Settings
from isokron.jax.learning_rate import with_learning_rate
from isokron.jax.linalg import spectral_direction
from isokron.jax.settings import LayoutSettings, Static, settle
from isokron.jax.transform import Gradients, Method, State, scale_by_preconditioned
from isokron.polynomials import Choice, schedule


def scale_by_muon(
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: str | None = "match_rms_adamw",
    steps: int | Static = Static(5),
    coefficients: Choice | None = "classic",
    dtype: Any = None,
    graft: str | None = None,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-8,
    **shared: Unpack[LayoutSettings],
) -> optax.GradientTransformationExtraArgs:
    """scale · polar(M): steepest descent in the spectral norm.

    Args:
        momentum: rate of the first moment M.
        nesterov: whether M looks one step ahead.
        scale: "match_rms_adamw" is 0.2√max(m, n), after which learning rates of AdamW fit;
            "original" is √max(1, m/n), None is 1.
        steps: Newton–Schulz iterations.
        coefficients: of their polynomials, see newton_schulz.
        dtype: of the iteration, see newton_schulz.
        graft: whose step length to take: None, "sgd", "adagrad", "rmsprop" or "adam".
        betas: of Adam, which steps all leaves that are not matrices; the second also of grafting.
        eps: ε of Adam.
        **shared: see LayoutSettings.
    """
    settings = settle("Muon", locals(), LayoutSettings)
    schedule(settings["coefficients"], settings["steps"])
    return scale_by_preconditioned(MUON, settings)


muon = with_learning_rate(scale_by_muon)


def _direction(grads: Gradients, state: State, settings: Settings) -> tuple[jax.Array, State]:
    names = ("scale", "steps", "coefficients", "dtype")
    return spectral_direction(grads.moment, *(settings[name] for name in names)), {}


MUON = Method(lambda *_: {}, _direction, heavy_ball=False, squares=False)
