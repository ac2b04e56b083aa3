"""Inverse roots (A + εI)^(−1/p) of symmetric positive matrices, by eigenvalues or by products."""

import torch
from torch import Tensor

from isokron.exponents import check_root
from isokron.linalg.eigen import eigh, power_of_two

# The least a matrix is damped by, in place of zero: that of a matrix of zeros is finite too.
LEAST = 1e-30

# Order of convergence of the coupled iterations: the error e becomes ~eᵒʳᵈᵉʳ in a step.
ORDERS = {"newton": 2, "higher": 3}
# From condition number κ the iterations take log κ / log growth + ~5 steps, growth = 2 at worst.
MAX_STEPS = 100
# Below this error a step must at least halve it; where it does not, rounding has the last word.
BASIN = 0.1
# Largest error ‖M − I‖ with which a root is returned. In float32 those that converge end near
# 1e-7·√n, the others far above, so this only parts the two. It does not see that A itself is
# rounded: as with any method, roots are accurate to about κ·eps/p (1e-3 for κ = 1e6, p = 4).
TOLERANCE = 1e-3


def inverse_root(
    matrix: Tensor,
    root: float,
    damping: float = 0.0,
    *,
    solver: str = "eigh",
    deficient: str = "lift",
    rtol: float | None = None,
    atol: float = 0.0,
) -> Tensor:
    """(A + εI)^(−1/p), p = `root`, ε = `damping`. A: [..., n, n], only its lower triangle is read.

    "eigh" treats eigenvalues as `inverse_power` does. "newton" and "higher" are products alone,
    for GPUs: they need an integer p and A + εI positive definite, and lift nothing.
    A matrix without a root (not finite, not converged, singular without ε) is not finite in the
    result.
    Half precision is computed and returned in float32.
    """
    if matrix.ndim < 2 or matrix.size(-2) != matrix.size(-1):
        raise ValueError(
            f"inverse_root needs matrices [..., n, n], got shape {tuple(matrix.shape)}"
        )
    check_root(root, damping, solver=solver, deficient=deficient, rtol=rtol, atol=atol)
    if solver != "eigh":
        unit = _unit(matrix.diagonal(dim1=-2, dim2=-1), damping)[..., None]
        added = damping if deficient == "lift" else unit
        return _coupled(matrix, int(root), added, ORDERS[solver])
    values, basis = eigh(matrix)
    powers = inverse_power(values, root, damping, deficient, rtol, atol)
    return (basis * powers.unsqueeze(-2)) @ basis.mT


def inverse_power(
    values: Tensor,
    root: float,
    damping: float = 0.0,
    deficient: str = "lift",
    rtol: float | None = None,
    atol: float = 0.0,
) -> Tensor:
    """λ^(−1/p) of the eigenvalues of positive matrices, which rounding may have moved. [..., n]

    "relative": as "lift", with ε in units of the mean eigenvalue.
    "lift":   (λ − min(λmin, 0) + ε)^(−1/p): a shift takes the least eigenvalue to at least ε.
    "pseudo": λ^(−1/p), and 0 where λ ≤ max(rtol·λmax, atol); `rtol` is n·eps unless given.
    """
    check_root(root, damping, deficient=deficient, rtol=rtol, atol=atol)
    if values.numel() == 0:
        return values
    if deficient != "pseudo":
        lowest = values.amin(-1, keepdim=True).clamp(max=0)
        added = damping if deficient == "lift" else _unit(values, damping)
        return (values - lowest + added) ** (-1 / root)
    if rtol is None:
        rtol = values.size(-1) * torch.finfo(values.dtype).eps
    threshold = (rtol * values.amax(-1, keepdim=True)).clamp(min=atol)
    return torch.where(values <= threshold, 0.0, values ** (-1 / root))  # NaN stays NaN


def _unit(values: Tensor, damping: float) -> Tensor:
    """ε times the mean eigenvalue, which is the mean of the diagonal. [..., n] → [..., 1]"""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return (damping * wide.mean(-1, keepdim=True)).clamp(min=LEAST if damping else 0.0)


def _coupled(matrix: Tensor, root: int, damping: float | Tensor, order: int) -> Tensor:
    """X ← X q(E), M ← q(E)ᵖ M, E = I − M, from X = z^(1/p) I, M = zA: M → I and X → A^(−1/p).

    q is the Taylor polynomial of (1 − E)^(−1/p) with `order` terms; two are Newton's. With the
    spectrum of zA in (0, 1], every eigenvalue of M rises to 1 without ever passing it.
    N. Higham, Functions of Matrices, ch. 7.
    """
    lower = matrix.to(torch.promote_types(matrix.dtype, torch.float32)).tril()
    if lower.numel() == 0:
        return lower
    eye = torch.eye(lower.size(-1), dtype=lower.dtype, device=lower.device)
    full = lower + lower.tril(-1).mT + damping * eye
    scale = power_of_two(full.abs().amax((-2, -1)))[..., None, None]
    full = full / scale
    bound = torch.minimum(  # two upper bounds of the largest eigenvalue
        torch.linalg.vector_norm(full, dim=(-2, -1), keepdim=True),
        full.abs().sum(-1, keepdim=True).amax(-2, keepdim=True),
    )
    m = full / bound
    x = eye * bound ** (-1 / root)
    error = _distance(m, eye)
    active = error > 0  # NaN is not, and is never returned either
    for _ in range(MAX_STEPS):
        if not active.any():
            break
        step = _taylor(eye - m, root, order)
        next_x, next_m = x @ step, torch.linalg.matrix_power(step, root) @ m
        next_error = _distance(next_m, eye)
        # outside the basin the error may stand still for long, while small eigenvalues grow
        going = next_error < torch.where(error < BASIN, error / 2, error * 2)
        taken = active & (going | (next_error < error))
        x, m = torch.where(taken, next_x, x), torch.where(taken, next_m, m)
        error = torch.where(taken, next_error, error)
        active = active & going
    x = (x + x.mT) / 2 * scale ** (-1 / root)
    return torch.where(error <= TOLERANCE, x, torch.nan)


def _distance(m: Tensor, eye: Tensor) -> Tensor:
    """‖M − I‖ of every matrix: Frobenius, since it bounds the eigenvalues. [..., 1, 1]"""
    return torch.linalg.vector_norm(m - eye, dim=(-2, -1), keepdim=True)


def _taylor(gap: Tensor, root: int, order: int) -> Tensor:
    """Σ_k c_k Eᵏ for k < order, c_k = c_{k−1} (1/p + k − 1)/k: (1 − E)^(−1/p), truncated."""
    coefficients = [1.0]
    for k in range(1, order):
        coefficients.append(coefficients[-1] * (1 / root + k - 1) / k)
    eye = torch.eye(gap.size(-1), dtype=gap.dtype, device=gap.device)
    total = coefficients[-1] * gap
    for c in reversed(coefficients[1:-1]):  # Horner
        total = (total + c * eye) @ gap
    return total + eye
