"""Muon: the momentum, orthogonalized (K. Jordan et al., 2024; scale of 2502.16982)."""

import math
from functools import partial
from typing import Any, Unpack

import jax
import optax

from isokron.jax.blocks import Settings, matrix_splits
from isokron.jax.linalg import newton_schulz
from isokron.jax.settings import (
    LayoutSettings,
    Static,
    check_choice,
    check_floating,
    settle,
    with_learning_rate,
)
from isokron.jax.transform import Gradients, Method, State, scale_by_preconditioned
from isokron.polynomials import Choice, schedule


def scale_by_muon(
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: str = "match_rms_adamw",
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
            "original" is √max(1, m/n).
        steps: Newton–Schulz iterations.
        coefficients: of their polynomials, see newton_schulz.
        dtype: of the iteration, see newton_schulz.
        graft: whose step length to take: None, "sgd", "adagrad", "rmsprop" or "adam".
        betas: of Adam, which steps all leaves that are not matrices; the second also of grafting.
        eps: ε of Adam.
        **shared: see LayoutSettings.
    """
    settings = settle("Muon", locals(), LayoutSettings)
    check_choice("scale", settings["scale"], ("match_rms_adamw", "original"))
    check_floating("dtype", settings["dtype"])
    schedule(settings["coefficients"], settings["steps"])
    return scale_by_preconditioned(MUON, settings)


muon = with_learning_rate(scale_by_muon)


def _direction(
    shown: Gradients, state: State, count: jax.Array, settings: Settings
) -> tuple[jax.Array, State]:
    rows, columns = shown.moment.shape[-2:]
    original = settings["scale"] == "original"
    scale = math.sqrt(max(1, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
    polar = newton_schulz(
        shown.moment, settings["steps"], settings["coefficients"], settings["dtype"]
    )
    return polar * scale, {}


MUON = Method(
    init=lambda batch, dtype, settings: {},
    direction=_direction,
    splits=partial(matrix_splits, order=2),
    heavy_ball=False,
    debias=False,  # the polar factor does not depend on the moment's scale
    squares=False,
)
