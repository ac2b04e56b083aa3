"""Inverse roots (A + εI)^(−1/p) of symmetric positive matrices."""

import torch
from torch import Tensor

from isokron.exponents import check_root
from isokron.linalg.eigen import eigh, power_of_two

# Least positive damping, so that the root of a zero matrix is finite.
MIN_DAMPING = 1e-30

# A condition number κ takes log κ / log 2 + ~5 steps at worst.
MAX_STEPS = 100
# Below this error a step must at least halve it; otherwise rounding has stopped the convergence.
BASIN = 0.1
# Largest error ‖M − I‖ of an accepted root. In float32 a converged iteration ends near 1e-7·√n and
# others end far above, so the exact value is not critical. A itself is rounded, which this does
# not measure: with any method, roots are accurate to about κ·eps/p (1e-3 for κ = 1e6, p = 4).
TOLERANCE = 1e-3


def inverse_root(
    matrix: Tensor,
    root: float,
    damping: float = 0.0,
    *,
    solver: str = "eigh",
    deficient: str = "lift",
) -> Tensor:
    """(A + εI)^(−1/p). A: [..., n, n]; only the lower triangle is read.

    A matrix without a root (not finite, not converged, or singular without damping) gives a result
    that is not finite. Half precision is computed and returned in float32.

    Args:
        root: p. The iterative solvers need an integer.
        damping: ε.
        solver: "eigh", or "newton" or "higher" (coupled iterations of order 2 or 3 that use matrix
            products only, for GPUs). The iterations need A + εI positive definite.
        deficient: what to do with eigenvalues that are not positive, see `inverse_power`.
    """
    if matrix.ndim < 2 or matrix.size(-2) != matrix.size(-1):
        raise ValueError(
            f"inverse_root needs matrices [..., n, n], got shape {tuple(matrix.shape)}"
        )
    check_root(root, damping, solver=solver, deficient=deficient)
    if solver != "eigh":
        relative = _relative_damping(matrix.diagonal(dim1=-2, dim2=-1), damping)[..., None]
        added = damping if deficient == "lift" else relative
        return _coupled_iteration(matrix, int(root), added, solver)
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


def _coupled_iteration(matrix: Tensor, root: int, damping: float | Tensor, solver: str) -> Tensor:
    """X ← X q(E), M ← q(E)ᵖ M, E = I − M, from X = z^(1/p) I, M = zA: M → I and X → A^(−1/p).

    q holds the first terms of (1 − E)^(−1/p): two for "newton", three for "higher", which converges
    with that order. If the spectrum of zA is in (0, 1], every eigenvalue of M increases to 1 and
    never exceeds it. N. Higham, Functions of Matrices, ch. 7.
    """
    lower = matrix.to(torch.promote_types(matrix.dtype, torch.float32)).tril()
    if lower.numel() == 0:
        return lower
    eye = torch.eye(lower.size(-1), dtype=lower.dtype, device=lower.device)
    full = lower + lower.tril(-1).mT + damping * eye
    scale = power_of_two(full.abs().amax((-2, -1)))[..., None, None]
    full = full / scale
    bound = torch.minimum(  # two upper bounds on the largest eigenvalue
        torch.linalg.vector_norm(full, dim=(-2, -1), keepdim=True),
        full.abs().sum(-1, keepdim=True).amax(-2, keepdim=True),
    )
    m = full / bound
    x = eye * bound ** (-1 / root)
    error = _distance(m, eye)
    linear, quadratic = 1 / root, 1 / root * (1 / root + 1) / 2  # Taylor coefficients of q
    active = error > 0  # False for NaN, which is never accepted
    for _ in range(MAX_STEPS):
        if not active.any():
            break
        gap = eye - m
        terms = linear * gap if solver == "newton" else (quadratic * gap + linear * eye) @ gap
        step = terms + eye
        next_m = torch.linalg.matrix_power(step, root) @ m
        next_x = x @ step
        next_error = _distance(next_m, eye)
        # outside the basin the error may stay large for many steps while small eigenvalues grow
        going = next_error < torch.where(error < BASIN, error / 2, error * 2)
        accepted = active & (going | (next_error < error))
        x, m = torch.where(accepted, next_x, x), torch.where(accepted, next_m, m)
        error = torch.where(accepted, next_error, error)
        active = active & going
    x = (x + x.mT) / 2 * scale ** (-1 / root)
    return torch.where(error <= TOLERANCE, x, torch.nan)


def _distance(m: Tensor, eye: Tensor) -> Tensor:
    """‖M − I‖ in Frobenius norm, which bounds the error of every eigenvalue. [..., 1, 1]"""
    return torch.linalg.vector_norm(m - eye, dim=(-2, -1), keepdim=True)
