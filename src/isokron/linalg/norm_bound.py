"""A lower bound on the spectral norm of a batch of matrices, by power iteration on a few probes."""

import torch
from torch import Tensor

from isokron.white_kron import POWER_STEPS


def norm_bound(matrix: Tensor, scale: Tensor, probes: Tensor) -> Tensor:
    """‖A‖₂ from below, for symmetric or skew A. [B, n, n], scale: [B], probes: [..., k, n] → [B]

    V₀ = a + rms(a)·probes, where a is the row of A with the largest norm; V ← VA/‖VA‖ per row,
    POWER_STEPS times; then max ‖VA‖. A = 0 has bound 0.
    scale: any number near the entries of A; squares of A/scale must not over- or underflow.
    """
    tiny = torch.finfo(matrix.dtype).tiny
    # scaling the few probes is cheaper than scaling the matrix
    inverse = scale.clamp_min(tiny).reciprocal()[:, None, None]
    energy = torch.linalg.vector_norm(matrix * inverse, dim=2)  # [B, n]
    largest = energy.argmax(1)[:, None, None].expand(-1, 1, matrix.size(2))
    row = matrix.gather(1, largest) * inverse  # [B, 1, n]
    vectors = row + row.square().mean(2, keepdim=True).sqrt() * probes
    for _ in range(POWER_STEPS):
        vectors = (vectors * inverse) @ matrix
        vectors = vectors / _row_norms(vectors).clamp_min(tiny)
    return _row_norms((vectors * inverse) @ matrix).amax((1, 2)) * scale


def _row_norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=2, keepdim=True)
