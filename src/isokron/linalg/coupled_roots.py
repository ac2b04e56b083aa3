"""Inverse roots of positive definite matrices by matrix products only, for accelerators."""

import torch
from torch import Tensor

from isokron.linalg.eigen import power_of_two

MAX_STEPS = 100
BASIN = 0.1  # of I − M, within which every step halves it at least
TOLERANCE = 1e-3  # of I − M, above which there is no result
PATIENCE = 4  # steps of a device between two looks at it, for which the host waits


def coupled_root(matrix: Tensor, root: int, order: int) -> Tensor:
    """A^(−1/p), p = `root`. A: [..., n, n], symmetric; NaN where it is not positive definite.

    X ← X q(E), M ← q(E)ᵖ M, E = I − M, from X = z^(1/p) I, M = zA: M → I and X → A^(−1/p).
    q is the Taylor polynomial of (1 − E)^(−1/p) up to E^(order − 1); order 2 is Newton's method.
    N. Higham, Functions of Matrices, ch. 7.
    """
    scale = power_of_two(matrix.abs().amax((-2, -1), keepdim=True))
    m = matrix / scale
    eye = torch.eye(m.size(-1), dtype=m.dtype, device=m.device)
    # two upper bounds of the largest eigenvalue
    norm = torch.linalg.matrix_norm(m, keepdim=True)
    bound = torch.minimum(norm, m.abs().sum(-1, keepdim=True).amax(-2, keepdim=True))
    x, m = eye * bound ** (-1 / root), m / bound
    curvature = (1 + 1 / root) / (2 * root)  # of the Taylor polynomial
    error = torch.linalg.matrix_norm(eye - m, keepdim=True)
    active = error > 0
    for step in range(MAX_STEPS):
        if (m.is_cpu or step % PATIENCE == 0) and not bool(active.any()):
            break
        gap = eye - m
        factor = eye + (gap / root if order == 2 else (eye / root + curvature * gap) @ gap)
        next_x, next_m = x @ factor, torch.linalg.matrix_power(factor, root) @ m
        next_error = torch.linalg.matrix_norm(eye - next_m, keepdim=True)
        # outside the basin the error may stand still for long, while small eigenvalues grow
        going = next_error < torch.where(error < BASIN, error / 2, error * 2)
        taken = active & (going | (next_error < error))
        x, m = torch.where(taken, next_x, x), torch.where(taken, next_m, m)
        error, active = torch.where(taken, next_error, error), active & going
    x = (x + x.mT) / 2 * scale ** (-1 / root)
    return torch.where(error <= TOLERANCE, x, torch.nan)
