"""Spectral descent: the steepest direction in the spectral norm, for matrices of any optimizer."""

import math

import torch
from torch import Tensor

from isokron.linalg import newton_schulz
from isokron.optim.moments import graft
from isokron.polynomials import Choice

SCALES = ("match_rms_adamw", "original")


def spectral_direction(
    moment: Tensor,
    scale: str = "match_rms_adamw",
    steps: int = 5,
    coefficients: Choice | None = "classic",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """scale · polar(M). [B, m, ...], with all dimensions after m as columns

    "match_rms_adamw" is 0.2√max(m, n), at which an update's RMS is about AdamW's; "original" is
    √max(1, m/n).
    """
    matrices = moment.flatten(2)
    rows, cols = matrices.shape[1:]
    original = scale == "original"
    factor = math.sqrt(max(1, rows / cols)) if original else 0.2 * math.sqrt(max(rows, cols))
    polar = newton_schulz(matrices, steps, coefficients, dtype=dtype) * factor
    return polar.view_as(moment)


def normalize_rows_(direction: Tensor, variance: Tensor, beta: float) -> Tensor:
    """P_i ← P_i/√v_i with v_i ← βv_i + (1−β)·mean(P_i²), scaled to the norm of P. [B, m, ...]

    `variance`: v, [B, m], updated in place; a sum at β = 1 (NorMuon, 2510.05491).
    """
    mean_squares = direction.flatten(2).square().mean(2)
    variance.mul_(beta).add_(mean_squares, alpha=1 - beta if beta < 1 else 1.0)
    # v is 0 only for rows that have always been 0
    scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).rsqrt().to(direction.dtype)
    return graft(direction * scale.view(*scale.shape, *[1] * (direction.ndim - 2)), direction)
