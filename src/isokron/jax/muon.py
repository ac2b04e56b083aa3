"""Muon: momentum, orthogonalised (K. Jordan et al., 2024; scale of 2502.16982)."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import optax

from isokron.jax.checks import check_choice
from isokron.jax.descent import descend
from isokron.jax.polar import newton_schulz
from isokron.jax.preconditioned import Method, scale_by_preconditioned
from isokron.jax.settings import Static, check_floating, settled
from isokron.jax.sides import State
from isokron.polynomials import Choice, schedule

Group = Mapping[str, Any]


def scale_by_muon(
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: str = "match_rms_adamw",
    steps: int | Static = Static(5),
    coefficients: Choice | None = "classic",
    dtype: Any = None,
    graft: str | None = None,
    graft_by: str = "block",
    betas: tuple[float, float] = (0.9, 0.99),
    stacked: Any = Static(0),
    split: tuple[int, ...] | int | None = None,
    split_dim: int | Static = Static(0),
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """scale · polar(M): steepest descent in the spectral norm.

    The arguments are those of isokron.Muon; see docs/jax.md. `stacked` may be a tree of numbers.
    """
    group = settled("Muon", locals())
    check_choice("scale", group["scale"], ("match_rms_adamw", "original"))
    check_floating("dtype", group["dtype"])
    schedule(group["coefficients"], group["steps"])
    return scale_by_preconditioned(MUON, group)


def muon(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    weight_decay_mask: Any = None,
    scale: str = "match_rms_adamw",
    steps: int | Static = Static(5),
    coefficients: Choice | None = "classic",
    dtype: Any = None,
    graft: str | None = None,
    graft_by: str = "block",
    betas: tuple[float, float] = (0.9, 0.99),
    stacked: Any = Static(0),
    split: tuple[int, ...] | int | None = None,
    split_dim: int | Static = Static(0),
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """scale_by_muon, then decayed weights, then the learning rate.

    `weight_decay_mask`: a tree of flags, or a function of the parameters: which of them decay.
    """
    return descend(scale_by_muon, locals())


def _direction(
    moment: jax.Array, state: State, step: jax.Array, group: Group
) -> tuple[jax.Array, State]:
    rows, cols = moment.shape[-2:]
    original = group["scale"] == "original"
    factor = math.sqrt(max(1, rows / cols)) if original else 0.2 * math.sqrt(max(rows, cols))
    polar = newton_schulz(moment, group["steps"], group["coefficients"], group["dtype"])
    return polar * factor, {}


MUON = Method(
    lambda rows, shape, dtype, group: {},
    lambda grad, state, step, group: {},
    lambda state, order, step, group: {},
    _direction,
    order=2,
    heavy_ball=False,
    debias=False,  # the polar factor does not depend on the moment's scale
    squares=False,
)
