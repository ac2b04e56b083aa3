"""Inverse roots (A + εI)^(−1/p) of symmetric positive matrices."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isokron.exponents import check_root
from isokron.linalg.coupled_roots import coupled_root
from isokron.linalg.eigen import eigh

# Least positive damping, so that the root of a zero matrix is finite.
MIN_DAMPING = 1e-30


def inverse_root(
    matrix: Tensor,
    root: float,
    damping: float = 0.0,
    deficient: str = "lift",
    solver: str = "eigh",
) -> Tensor:
    """(A + εI)^(−1/p), p = `root`, ε = `damping`. A: [..., n, n]; only the lower triangle is read.

    A matrix without a root (not finite, or singular without damping) gives a result that is not
    finite. Half precision is computed and returned in float32. `deficient` is what to do with
    eigenvalues that are not positive, see `inverse_power`. Autograd can differentiate it, once.
    solver="newton" and "higher" use matrix products only, for accelerators, with an integer p;
    where they find none, as of an A that rounding has made indefinite, the root is that of "eigh".
    """
    if matrix.ndim < 2 or matrix.size(-2) != matrix.size(-1):
        raise ValueError(
            f"inverse_root needs matrices [..., n, n], got shape {tuple(matrix.shape)}"
        )
    check_root(root, damping, solver=solver, deficient=deficient)
    if matrix.requires_grad and torch.is_grad_enabled():
        symmetric = matrix.tril() + matrix.tril(-1).mT
        return _InverseRoot.apply(symmetric, root, damping, deficient)
    if solver != "eigh" and matrix.numel():
        lower = matrix.to(torch.promote_types(matrix.dtype, torch.float32)).tril()
        full, diagonal = lower + lower.tril(-1).mT, lower.diagonal(dim1=-2, dim2=-1)
        added = damping if deficient == "lift" else _relative_damping(diagonal, damping)
        full.diagonal(dim1=-2, dim2=-1).add_(added)
        result = coupled_root(full, int(root), order=2 if solver == "newton" else 3)
        missing = result.isnan().flatten(-2).any(-1)
        if bool(missing.any()):
            result[missing] = _by_eigenvalues(matrix[missing], root, damping, deficient)
        return result
    return _by_eigenvalues(matrix, root, damping, deficient)


def _by_eigenvalues(matrix: Tensor, root: float, damping: float, deficient: str) -> Tensor:
    values, basis = eigh(matrix)
    powers = inverse_power(values, root, damping, deficient)
    return (basis * powers.unsqueeze(-2)) @ basis.mT


class _InverseRoot(torch.autograd.Function):
    """f(A) = (A + sI)^(−1/p) with its derivative, which exists where eigenvalues are equal too.

    With A = Q diag(λ) Qᵀ, df = Q(Γ ∘ QᵀdAQ)Qᵀ, Γ_ij = (f(λ_i) − f(λ_j))/(λ_i − λ_j) and f'(λ_i)
    in the limit (Daleckii and Krein); a relative s = ε·mean(λ) adds f'(A) ds.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, root: float, damping: float, deficient: str) -> Tensor:
        values, basis = eigh(matrix)
        powers = inverse_power(values, root, damping, deficient)
        ctx.save_for_backward(basis, powers)
        ctx.root, ctx.dtype = root, matrix.dtype
        ctx.damping = damping if deficient == "relative" else 0.0
        return (basis * powers.unsqueeze(-2)) @ basis.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        basis, powers = ctx.saved_tensors
        # of a pseudo-inverse the powers of what is left out are 0, and count as constant
        values = torch.where(powers > 0, powers ** (-ctx.root), 0.0)
        change, gap = (x.unsqueeze(-1) - x.unsqueeze(-2) for x in (powers, values))
        middle = (values.unsqueeze(-1) + values.unsqueeze(-2)) / 2
        slope = torch.where(middle > 0, -(middle ** (-1 / ctx.root - 1)) / ctx.root, 0.0)
        close = gap.abs() <= torch.finfo(gap.dtype).eps ** (1 / 3) * middle
        slopes = torch.where(close, slope, change / gap)
        rotated = basis.mT @ (grad + grad.mT) @ basis / 2
        total = (slope * rotated).diagonal(dim1=-2, dim2=-1).sum(-1)
        result = basis @ (slopes * rotated) @ basis.mT
        result.diagonal(dim1=-2, dim2=-1).add_(
            (ctx.damping / powers.size(-1) * total).unsqueeze(-1)
        )
        return result.to(ctx.dtype), None, None, None


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
