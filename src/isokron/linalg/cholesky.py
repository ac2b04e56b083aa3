"""Cholesky factors of symmetric positive matrices, also where rounding has made them singular."""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isokron.linalg.eigen import eigh

logger = logging.getLogger(__name__)

# Added to the diagonal in units of its mean size, once double precision alone has failed.
JITTERS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
# The least eigenvalue that `eigh` leaves, in units of the largest: no jitter below has sufficed.
FLOOR = JITTERS[-1]


@dataclass(frozen=True, eq=False)
class Cholesky:
    """A = L Lᵀ. lower L: [..., n, n], in float64 where a matrix of the batch needed it.

    rungs: how far each matrix, in the order of `flatten`, had to climb; count them with Counter.
    """

    lower: Tensor
    rungs: tuple[str, ...]

    def solve(self, y: Tensor) -> Tensor:
        """A⁻¹ y in the dtype of y. y: [..., n, k], or [..., n] for one vector a matrix."""
        if y.shape == self.lower.shape[:-1]:
            return self.solve(y.unsqueeze(-1)).squeeze(-1)
        if y.shape[:-1] != self.lower.shape[:-1]:
            raise ValueError(
                f"solve needs y of shape [..., n, k] or [..., n] for matrices "
                f"{tuple(self.lower.shape)}, got {tuple(y.shape)}"
            )
        wide = y.to(torch.promote_types(y.dtype, self.lower.dtype))
        return torch.cholesky_solve(wide, self.lower.to(wide.dtype)).to(y.dtype)

    def inverse(self) -> Tensor:
        """A⁻¹: [..., n, n]"""
        return torch.cholesky_inverse(self.lower)

    def logdet(self) -> Tensor:
        """log det A = 2 Σ log Lᵢᵢ: [...]"""
        return 2 * self.lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def factorize(matrix: Tensor, damping: float = 0.0, *, name: str = "matrix") -> Cholesky:
    """A + λI = L Lᵀ, λ = `damping`. A: [..., n, n], of which only the lower triangle is read.

    Each matrix climbs until it is positive: "as given" → "float64" → "jitter 1e-08" … "jitter
    0.001" of its mean diagonal, in float64 → "eigh", its eigenvalues lifted to 1e-3 of the largest.
    Half precision is computed in float32. `name` is what an error calls the matrix.
    """
    if matrix.ndim < 2 or matrix.size(-2) != matrix.size(-1):
        raise ValueError(
            f"factorize needs matrices [..., n, n], {name} has shape {tuple(matrix.shape)}"
        )
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32)).tril()
    n = wide.size(-1)
    batch = wide.reshape(wide.shape[:-2].numel(), n, n)
    finite = batch.isfinite().all(-1).all(-1)
    if not finite.all():
        raise ValueError(
            f"{name} must be finite, {int((~finite).sum())} of {len(batch)} matrices are not; "
            "look for overflow in what was summed into it"
        )
    batch.diagonal(dim1=-2, dim2=-1).add_(damping)
    lower, rungs = _climb(batch, name)
    return Cholesky(lower.view(wide.shape), tuple(rungs))


def _climb(batch: Tensor, name: str) -> tuple[Tensor, list[str]]:
    """Every matrix by the first rung that takes it. [B, n, n], lower triangles"""
    lower, positive = _attempt(batch)
    rungs = ["as given"] * len(batch)
    pending = (~positive).nonzero().flatten()
    if not len(pending):
        return lower, rungs
    lower = lower.double()
    retries = [] if batch.dtype is torch.float64 else [("float64", 0.0)]
    retries += [(f"jitter {jitter:g}", jitter) for jitter in JITTERS]
    for rung, jitter in retries:
        tried = batch[pending].double()
        diagonal = tried.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(jitter * diagonal.abs().mean(-1, keepdim=True))
        found, positive = _attempt(tried)
        lower[pending[positive]] = found[positive]
        _note(rungs, rung, pending[positive], name)
        pending = pending[~positive]
        if not len(pending):
            return lower, rungs
    lower[pending] = _lifted(batch[pending].double(), name)
    _note(rungs, "eigh", pending, name)
    return lower, rungs


def _attempt(batch: Tensor) -> tuple[Tensor, Tensor]:
    """L, and whether every pivot Lᵢᵢ² is more than what rounding leaves of Aᵢᵢ, √n·eps·Aᵢᵢ."""
    lower, info = torch.linalg.cholesky_ex(batch)
    pivots = lower.diagonal(dim1=-2, dim2=-1).square()
    rounding = math.sqrt(batch.size(-1)) * torch.finfo(batch.dtype).eps
    clear = pivots > rounding * batch.diagonal(dim1=-2, dim2=-1)
    return lower, (info == 0) & clear.all(-1)


def _lifted(batch: Tensor, name: str) -> Tensor:
    """L of Q max(Λ, floor) Qᵀ = RᵀR, R the triangle of (Q √Λ)ᵀ: no product squares its errors."""
    values, vectors = eigh(batch)
    peak = values.abs().amax(-1, keepdim=True)
    if not (peak > 0).all():  # zeros, or NaN where eigh gave up
        raise ValueError(
            f"{name} must be positive, {int((~(peak > 0)).sum())} matrices are zero or have no "
            "eigenvalues; give it damping"
        )
    roots = values.clamp(min=FLOOR * peak).sqrt()
    upper = torch.linalg.qr((vectors * roots.unsqueeze(-2)).mT, mode="r").R
    return upper.mT * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def _note(rungs: list[str], rung: str, which: Tensor, name: str) -> None:
    for i in which.tolist():
        rungs[i] = rung
    if len(which):
        logger.warning("Cholesky of %s: %d of %d by %s", name, len(which), len(rungs), rung)
