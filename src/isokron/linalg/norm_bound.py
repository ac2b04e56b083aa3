"""A lower bound of the spectral norm of many matrices at once, by power steps on a few probes."""

import torch
from torch import Tensor

from isokron.white_kron import POWER_STEPS


def norm_bound(matrix: Tensor, scale: Tensor, probes: Tensor) -> Tensor:
    """‖A‖₂ from below, for symmetric or skew A. [B, n, n], scale: [B], probes: [..., k, n] → [B]

    V₀ = a + rms(a)·probes with a the row of A of largest energy; V ← VA/‖VA‖ row by row, six
    times; then max ‖VA‖. All of it on A/scale, whose squares must neither over- nor underflow:
    any number near the entries will do. A = 0 has bound 0.
    """
    tiny = torch.finfo(matrix.dtype).tiny
    # A itself stays as it is: dividing the few probes costs less than dividing the matrix
    inverse = scale.clamp_min(tiny).reciprocal()[:, None, None]
    energy = torch.linalg.vector_norm(matrix * inverse, dim=2)  # [B, n]
    largest = energy.argmax(1)[:, None, None].expand(-1, 1, matrix.size(2))
    row = matrix.gather(1, largest) * inverse  # [B, 1, n]
    vectors = row + row.square().mean(2, keepdim=True).sqrt() * probes
    for _ in range(POWER_STEPS):
        vectors = (vectors * inverse) @ matrix
        vectors = vectors / _length(vectors).clamp_min(tiny)
    return _length((vectors * inverse) @ matrix).amax((1, 2)) * scale


def _length(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=2, keepdim=True)
