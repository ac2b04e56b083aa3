"""Eigenvalues and eigenvectors of symmetric matrices, where one bad matrix spoils no other."""

import logging
from collections import Counter

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isokron.linalg.host import surely_all
from isokron.linalg.threads import each, singly

logger = logging.getLogger(__name__)

# Added to the diagonal in units of its mean size, once double precision alone has failed.
JITTERS = (1e-7, 1e-6, 1e-5)


def eigh(matrix: Tensor, retries: Counter[str] | None = None) -> tuple[Tensor, Tensor]:
    """A = Q diag(λ) Qᵀ, λ ascending. A: [..., n, n], of which only the lower triangle is read.

    Half precision is computed and returned in float32. Where A is not finite, or every retry
    failed, λ and Q of that matrix are NaN. Retries: alone → float64 → float64 with jitter, and
    `retries` counts the matrices that each of them helped.
    """
    if matrix.ndim < 2 or matrix.size(-2) != matrix.size(-1):
        raise ValueError(f"eigh needs matrices [..., n, n], got shape {tuple(matrix.shape)}")
    lower = matrix.to(torch.promote_types(matrix.dtype, torch.float32)).tril()
    if lower.numel() == 0:
        return lower.new_zeros(lower.shape[:-1]), lower
    least, most = lower.flatten(-2).aminmax(dim=-1)  # NaN where any entry is
    peak = torch.maximum(-least, most)
    finite = peak.isfinite()
    all_finite = surely_all(finite)
    if not all_finite:  # no backend is to see the others: some raise, some never return
        peak = torch.where(finite, peak, 1.0)
        lower = lower.masked_fill(~finite[..., None, None], 0.0)
    scale = power_of_two(peak)
    lower = lower / scale[..., None, None]  # and nothing is held of what was not divided
    values, vectors = _decompose(lower, Counter() if retries is None else retries)
    values = values * scale[..., None]
    if not all_finite:
        values = values.masked_fill(~finite[..., None], torch.nan)
        vectors = vectors.masked_fill(~finite[..., None, None], torch.nan)
    return values, vectors


def power_of_two(peak: Tensor) -> Tensor:
    """The power of two with peak/power in [1, 2): dividing by it rounds nothing. 0 gives tiny."""
    peak = peak.clamp(min=torch.finfo(peak.dtype).tiny)
    return peak / (2 * torch.frexp(peak).mantissa)


def _decompose(scaled: Tensor, retries: Counter[str]) -> tuple[Tensor, Tensor]:
    try:
        if singly(scaled):
            pairs = each(_checked, scaled)
            return torch.stack([v for v, _ in pairs]), torch.stack([q for _, q in pairs])
        return _checked(scaled)
    except LinAlgError:
        batch = scaled.flatten(0, -3) if scaled.ndim > 2 else scaled[None]
        values, vectors = _one_by_one(batch, retries)
        return values.view(scaled.shape[:-1]), vectors.view(scaled.shape)


def _checked(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """eigh, where results that are not finite, of which LAPACK says nothing, are a failure too.

    On a device they are returned as they are: looking at them would make the host wait.
    """
    values, vectors = torch.linalg.eigh(matrix, UPLO="L")
    if matrix.is_cpu and not bool((values.sum() + vectors.sum()).isfinite()):
        raise LinAlgError("eigenvalues or eigenvectors are not finite")
    return values, vectors


def _one_by_one(batch: Tensor, counts: Counter[str]) -> tuple[Tensor, Tensor]:
    """What the batched call could not do, by ever stronger means. batch: [B, n, n]"""
    values = torch.full_like(batch[..., 0], torch.nan)
    vectors = torch.full_like(batch, torch.nan)
    # a lone matrix has already failed as given, and double precision cannot be raised
    retries = [] if len(batch) == 1 else [("one at a time", batch.dtype, 0.0)]
    retries += [] if batch.dtype is torch.float64 else [("in float64", torch.float64, 0.0)]
    retries += [(f"in float64 with jitter {j:g}", torch.float64, j) for j in JITTERS]
    pending = list(range(len(batch)))
    for name, dtype, jitter in retries:
        logger.warning("eigh failed: retrying %d of %d matrices %s", len(pending), len(batch), name)
        failed = []
        for i in pending:
            try:
                found = _jittered(batch[i].to(dtype), jitter)
            except LinAlgError:
                failed.append(i)
            else:
                values[i], vectors[i] = found
                counts[name] += 1
        pending = failed
        if not pending:
            break
    if pending:
        logger.warning("eigh failed: giving up on %d of %d matrices", len(pending), len(batch))
    return values, vectors


def _jittered(matrix: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """eig(A + δI) − δ = eig(A): δ is taken off again, so jitter moves rounding errors only."""
    delta = jitter * matrix.diagonal().abs().mean()
    shifted = matrix + delta * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    values, vectors = _checked(shifted)
    return values - delta, vectors
