"""Spectral descent: the steepest direction in the spectral norm, for matrices of any optimizer."""

import math

import torch
from torch import Tensor

from isokron.linalg import newton_schulz
from isokron.polynomials import Choice

SCALES = ("match_rms_adamw", "original", None)


def spectral_direction(
    moment: Tensor,
    scale: str | None = "match_rms_adamw",
    steps: int = 5,
    coefficients: Choice | None = "classic",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """scale · polar(M). [B, m, ...], with all dimensions after m as columns

    "match_rms_adamw" is 0.2√max(m, n), at which an update's RMS is about AdamW's; "original" is
    √max(1, m/n), None is 1.
    """
    matrices = moment.flatten(2)
    rows, cols = matrices.shape[1:]
    # steps record no graph, except when training is unrolled
    recorded = torch.is_grad_enabled() and moment.requires_grad
    method = "differentiable" if recorded else "auto"
    polar = newton_schulz(matrices, steps, coefficients, dtype=dtype, method=method)
    return (polar * spectral_scale(rows, cols, scale)).reshape(moment.shape)


def spectral_scale(rows: int, cols: int, scale: str | None) -> float:
    """The spectral norm of an update [rows, cols]."""
    if scale is None:
        return 1.0
    original = scale == "original"
    return math.sqrt(max(1, rows / cols)) if original else 0.2 * math.sqrt(max(rows, cols))
