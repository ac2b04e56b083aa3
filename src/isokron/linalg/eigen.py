"""Eigendecompositions of symmetric matrices with retries, and eigenbases that track a matrix."""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isokron.linalg.device_transfer import surely_all
from isokron.linalg.threads import map_matrices, worth_threads

logger = logging.getLogger(__name__)

# Added to the diagonal, in units of its mean size, after float64 alone has failed.
JITTERS = (1e-7, 1e-6, 1e-5)
# Columns of length 1 of which less is outside of the span of those before are not made orthogonal
# by products, to the rounding of their dtype.
MIN_APART = {torch.float32: 2e-4, torch.float64: 1 / 16}


def eigh(matrix: Tensor, retries: Counter[str] | None = None) -> tuple[Tensor, Tensor]:
    """A = Q diag(λ) Qᵀ, λ ascending. A: [..., n, n]; only the lower triangle is read.

    Half precision is computed and returned in float32. A matrix that fails is retried alone, in
    float64, and in float64 with jitter; `retries` counts the matrices that each of them helped. If
    A is not finite or every retry fails, its λ and Q are NaN; other matrices of the batch are not
    affected.
    """
    if matrix.ndim < 2 or matrix.size(-2) != matrix.size(-1):
        raise ValueError(f"eigh needs matrices [..., n, n], got shape {tuple(matrix.shape)}")
    lower = matrix.to(torch.promote_types(matrix.dtype, torch.float32)).tril()
    if lower.numel() == 0:
        return lower.new_zeros(lower.shape[:-1]), lower
    least, most = lower.flatten(-2).aminmax(dim=-1)  # NaN if any entry is
    peak = torch.maximum(-least, most)
    finite = peak.isfinite()
    all_finite = surely_all(finite)
    if not all_finite:
        # with NaN or infinity some backends raise and some never return
        peak = torch.where(finite, peak, 1.0)
        lower = lower.masked_fill(~finite[..., None, None], 0.0)
    scale = power_of_two(peak)
    lower = lower / scale[..., None, None]
    values, vectors = _decompose(lower, Counter() if retries is None else retries)
    values = values * scale[..., None]
    if not all_finite:
        values = values.masked_fill(~finite[..., None], torch.nan)
        vectors = vectors.masked_fill(~finite[..., None, None], torch.nan)
    return values, vectors


def eigenbasis(matrix: Tensor) -> Tensor:
    """Eigenvectors by descending eigenvalue. [..., n, n]; only the lower triangle is read."""
    return eigh(matrix)[1].flip(-1)


def follow(matrix: Tensor, basis: Tensor, by: str = "qr") -> Tensor:
    """One orthogonal iteration Q ← QR(AQ), columns by descending Rayleigh quotient. [..., n, n]

    The iteration converges to the eigenvectors only in this order (SOAP, 2409.11321).
    by="cholesky" is for accelerators: see `cholesky_q`.
    """
    if by not in ("qr", "cholesky"):
        raise ValueError(f"by must be 'qr' or 'cholesky', got {by!r}")
    orthogonal = householder_q if by == "qr" else cholesky_q
    if worth_threads(matrix):
        return torch.stack(map_matrices(partial(_follow, orthogonal), matrix, basis))
    return _follow(orthogonal, matrix, basis)


def householder_q(columns: Tensor) -> Tensor:
    """Q of A = QR. [..., n, n]"""
    return torch.linalg.householder_product(*torch.geqrf(columns))


def cholesky_q(columns: Tensor) -> Tensor:
    """Q of A = QR as AR⁻¹, RᵀR = AᵀA, in float64: products, no reflections. [..., n, n]

    It is exact where columns are not too far from orthogonal, as those of AQ are for a basis Q that
    has nearly diagonalized A. Other matrices go to Householder's reflections; to know which, the
    host waits for a device.
    """
    length = torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    unit = (columns / length.clamp(min=torch.finfo(columns.dtype).tiny)).double()
    lower, _ = torch.linalg.cholesky_ex(unit.mT @ unit)
    apart = lower.diagonal(dim1=-2, dim2=-1).amin(-1) > MIN_APART[columns.dtype]  # not for NaN
    q = torch.linalg.solve_triangular(lower.mT, unit, upper=True, left=False).to(columns.dtype)
    if bool(apart.all()):
        return q
    return torch.where(apart[..., None, None], q, householder_q(columns))


def offdiagonal(matrix: Tensor, basis: Tensor) -> Tensor:
    """‖QᵀAQ − diag(QᵀAQ)‖ / ‖A‖: how far the basis is from diagonalizing A. [...]"""
    peak = matrix.abs().amax((-2, -1), keepdim=True)
    rotated = basis.mT @ (matrix / torch.where(peak > 0, peak, 1.0)) @ basis
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    outside = torch.linalg.matrix_norm(rotated - torch.diag_embed(diagonal))
    return outside / torch.linalg.matrix_norm(rotated).clamp(min=torch.finfo(rotated.dtype).tiny)


class Lifted(NamedTuple):
    """Eigenvalues of at least λmax/κ. values: [..., k]; lifted: how many were raised, [...]"""

    values: Tensor
    lifted: Tensor


def lift(values: Tensor, max_condition: float) -> Lifted:
    """max(λ, λmax/κ), κ = `max_condition`. values λ: [..., k], in any order"""
    if not max_condition >= 1:
        raise ValueError(f"max_condition must be at least 1, got {max_condition!r}")
    floor = values.amax(-1, keepdim=True).clamp(min=0) / max_condition
    return Lifted(torch.maximum(values, floor), (values < floor).sum(-1))


def power_of_two(peak: Tensor) -> Tensor:
    """The power of two with peak/power in [1, 2), so that division is exact. tiny for peak 0."""
    peak = peak.clamp(min=torch.finfo(peak.dtype).tiny)
    return peak / (2 * torch.frexp(peak).mantissa)


def _follow(orthogonal: Callable[[Tensor], Tensor], matrix: Tensor, basis: Tensor) -> Tensor:
    peak = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    nonzero = peak > 0  # a zero matrix has no preferred basis: keep the old one
    image = (matrix @ basis).div_(torch.where(nonzero, peak, 1.0))
    order = (basis * image).sum(-2, keepdim=True).argsort(dim=-1, descending=True, stable=True)
    turned = orthogonal(image.gather(-1, order.expand_as(image)))
    return torch.where(nonzero, turned, basis)


def _decompose(scaled: Tensor, retries: Counter[str]) -> tuple[Tensor, Tensor]:
    try:
        if worth_threads(scaled):
            pairs = map_matrices(_checked_eigh, scaled)
            return torch.stack([v for v, _ in pairs]), torch.stack([q for _, q in pairs])
        return _checked_eigh(scaled)
    except LinAlgError:
        batch = scaled.flatten(0, -3) if scaled.ndim > 2 else scaled[None]
        values, vectors = _retry(batch, retries)
        return values.view(scaled.shape[:-1]), vectors.view(scaled.shape)


def _checked_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """torch.linalg.eigh that also raises for a result that is not finite, on the CPU."""
    values, vectors = torch.linalg.eigh(matrix, UPLO="L")
    # LAPACK may return NaN without an error; on a device the check would wait for the result
    if matrix.is_cpu and not bool((values.sum() + vectors.sum()).isfinite()):
        raise LinAlgError("eigenvalues or eigenvectors are not finite")
    return values, vectors


def _retry(batch: Tensor, retries: Counter[str]) -> tuple[Tensor, Tensor]:
    """Decompose the matrices one by one, in float64 and with jitter where needed. [B, n, n]"""
    values = torch.full_like(batch[..., 0], torch.nan)
    vectors = torch.full_like(batch, torch.nan)
    # a batch of one has already failed alone
    attempts = [] if len(batch) == 1 else [("one at a time", batch.dtype, 0.0)]
    attempts += [] if batch.dtype is torch.float64 else [("in float64", torch.float64, 0.0)]
    attempts += [(f"in float64 with jitter {j:g}", torch.float64, j) for j in JITTERS]
    eye = torch.eye(batch.size(-1), dtype=torch.float64, device=batch.device)
    for i, matrix in enumerate(batch):
        outcome = "failed every retry"
        for name, dtype, jitter in attempts:
            # eig(A + δI) − δ = eig(A), so that jitter changes only the rounding errors
            delta = jitter * matrix.to(dtype).diagonal().abs().mean()
            with suppress(LinAlgError):
                shifted, vectors[i] = _checked_eigh(matrix.to(dtype) + delta * eye.to(dtype))
                values[i] = shifted - delta
                retries[name] += 1
                outcome = f"decomposed {name}"
                break
        logger.warning("eigh failed: matrix %d of %d %s", i + 1, len(batch), outcome)
    return values, vectors
