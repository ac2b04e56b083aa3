"""Inverse roots (A + εI)^(−1/p) of symmetric positive matrices."""

import torch
from torch import Tensor

from isokron.exponents import check_root
from isokron.linalg.eigen import eigh

# Least positive damping, so that the root of a zero matrix is finite.
MIN_DAMPING = 1e-30


def inverse_root(
    matrix: Tensor, root: float, damping: float = 0.0, deficient: str = "lift"
) -> Tensor:
    """(A + εI)^(−1/p), p = `root`, ε = `damping`. A: [..., n, n]; only the lower triangle is read.

    A matrix without a root (not finite, or singular without damping) gives a result that is not
    finite. Half precision is computed and returned in float32. `deficient` is what to do with
    eigenvalues that are not positive, see `inverse_power`.
    """
    if matrix.ndim < 2 or matrix.size(-2) != matrix.size(-1):
        raise ValueError(
            f"inverse_root needs matrices [..., n, n], got shape {tuple(matrix.shape)}"
        )
    check_root(root, damping, deficient=deficient)
    values, basis = eigh(matrix)
    powers = inverse_power(values, root, damping, deficient)
    return (basis * powers.unsqueeze(-2)) @ basis.mT


def inverse_power(
    values: Tensor, root: float, damping: float = 0.0, deficient: str = "lift"
) -> Tensor:
    """λ^(−1/p) for eigenvalues of positive matrices, some of which rounding made negative. [..., n]

    deficient="lift" shifts the smallest eigenvalue to at least ε = `damping`,
    (λ − min(λmin, 0) + ε)^(−1/p); "relative" does the same with ε in units of the mean eigenvalue;
    "pseudo" is the pseudo-inverse, 0 where λ ≤ n·eps·λmax.
    """
    check_root(root, damping, deficient=deficient)
    if values.numel() == 0:
        return values
    if deficient != "pseudo":
        lowest = values.amin(-1, keepdim=True).clamp(max=0)
        added = damping if deficient == "lift" else _relative_damping(values, damping)
        return (values - lowest + added) ** (-1 / root)
    rounding = values.size(-1) * torch.finfo(values.dtype).eps
    threshold = (rounding * values.amax(-1, keepdim=True)).clamp(min=0)
    return torch.where(values <= threshold, 0.0, values ** (-1 / root))  # NaN stays NaN


def _relative_damping(values: Tensor, damping: float) -> Tensor:
    """ε times the mean eigenvalue, which is the mean of the diagonal. [..., n] → [..., 1]"""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return (damping * wide.mean(-1, keepdim=True)).clamp(min=MIN_DAMPING if damping else 0.0)
