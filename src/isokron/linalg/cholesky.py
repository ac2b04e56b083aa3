"""Cholesky factors of symmetric positive matrices that rounding may have made singular."""

import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor

from isokron.linalg.eigen import eigh

logger = logging.getLogger(__name__)

# Added to the diagonal, in units of its mean size, after float64 alone has failed.
JITTERS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
# Smallest eigenvalue after clamping, in units of the largest: no smaller jitter was enough.
FLOOR = JITTERS[-1]


class Cholesky(NamedTuple):
    """A = L Lᵀ. lower L: [..., n, n], in float64 if any matrix of the batch needed it.

    rungs: the step of the fallback sequence that each matrix needed, in the order of `flatten`.
    """

    lower: Tensor
    rungs: tuple[str, ...]


def factorize(matrix: Tensor, damping: float = 0.0, *, name: str = "matrix") -> Cholesky:
    """A + λI = L Lᵀ, λ = `damping`. A: [..., n, n]; only the lower triangle is read.

    Each matrix falls back until it is positive: "as given" → "float64" → "jitter 1e-08" … "jitter
    0.001" of its mean diagonal, in float64 → "eigh", with eigenvalues clamped to 1e-3 of the
    largest. Half precision is computed in float32. Errors and warnings call the matrix `name`.
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
            "look for overflow in the data it was accumulated from"
        )
    batch.diagonal(dim1=-2, dim2=-1).add_(damping)
    lower, rungs = _factorize_with_fallbacks(batch, name)
    return Cholesky(lower.view(wide.shape), tuple(rungs))


def _factorize_with_fallbacks(batch: Tensor, name: str) -> tuple[Tensor, list[str]]:
    """L and the fallback used, for lower triangles [B, n, n]."""
    lower, positive = _attempt(batch)
    rungs = ["as given"] * len(batch)
    pending = (~positive).nonzero().flatten()
    if not len(pending):
        return lower, rungs
    lower = lower.double()
    fallbacks: list[tuple[str, float | None]] = [("float64", 0.0)]
    fallbacks += [(f"jitter {jitter:g}", jitter) for jitter in JITTERS]
    for rung, jitter in [*fallbacks[batch.dtype is torch.float64 :], ("eigh", None)]:
        wide = batch[pending].double()
        if jitter is None:
            factors, positive = _clamped_factors(wide, name), torch.ones_like(pending).bool()
        else:
            diagonal = wide.diagonal(dim1=-2, dim2=-1)
            diagonal.add_(jitter * diagonal.abs().mean(-1, keepdim=True))
            factors, positive = _attempt(wide)
        lower[pending[positive]] = factors[positive]
        for i in pending[positive].tolist():
            rungs[i] = rung
        if count := int(positive.sum()):
            logger.warning("Cholesky of %s: %d of %d by %s", name, count, len(batch), rung)
        pending = pending[~positive]
        if not len(pending):
            break
    return lower, rungs


def _attempt(batch: Tensor) -> tuple[Tensor, Tensor]:
    """L, and whether every pivot Lᵢᵢ² exceeds its rounding error √n·eps·Aᵢᵢ. [B, n, n], [B]"""
    lower, info = torch.linalg.cholesky_ex(batch)
    pivots = lower.diagonal(dim1=-2, dim2=-1).square()
    rounding = math.sqrt(batch.size(-1)) * torch.finfo(batch.dtype).eps
    clear = pivots > rounding * batch.diagonal(dim1=-2, dim2=-1)
    return lower, (info == 0) & clear.all(-1)


def _clamped_factors(batch: Tensor, name: str) -> Tensor:
    """L of Q max(Λ, floor) Qᵀ."""
    values, vectors = eigh(batch)
    peak = values.abs().amax(-1, keepdim=True)
    if not (peak > 0).all():  # zero, or NaN if eigh failed
        raise ValueError(
            f"{name} must be positive, {int((~(peak > 0)).sum())} matrices are zero or have no "
            "eigenvalues; give it damping"
        )
    roots = values.clamp(min=FLOOR * peak).sqrt()
    # QR of (Q √Λ)ᵀ gives L without forming the product, which would square the rounding errors
    upper = torch.linalg.qr((vectors * roots.unsqueeze(-2)).mT, mode="r").R
    return upper.mT * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
