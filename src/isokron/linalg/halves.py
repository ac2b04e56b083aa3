"""The lower half of a symmetric matrix as a rectangle, which is what has to travel."""

from torch import Tensor


def halved(matrix: Tensor) -> Tensor:
    """d(d+1)/2 numbers, of the lower half alone. [B, d, d] → [B, d(d+1)/2]

    With A = [A₁ ·; A₂ A₃] cut at h = d//2: A₃'s lower half beside A₁'s transposed fills d−h rows of
    h+1, and A₂ is a rectangle already.
    """
    size = matrix.size(-1)
    h = size // 2
    corner = matrix.new_zeros(len(matrix), size - h, h + 1)
    corner[:, :, : size - h] = matrix[:, h:, h:].tril()
    corner[:, :h, 1:] += matrix[:, :h, :h].tril().mT
    return _joined(corner, matrix[:, h:, :h])


def unhalve_(matrix: Tensor, half: Tensor) -> Tensor:
    """Write the lower half; what stands above the diagonal keeps no meaning. See `mirror_`."""
    size = matrix.size(-1)
    h = size // 2
    cut = (size - h) * (h + 1)
    corner = half[:, :cut].view(len(matrix), size - h, h + 1)
    matrix[:, h:, h:] = corner[:, :, : size - h].tril()
    matrix[:, :h, :h] = corner[:, :h, 1:].triu().mT
    matrix[:, h:, :h] = half[:, cut:].view(len(matrix), size - h, h)
    return matrix


def _joined(corner: Tensor, below: Tensor) -> Tensor:
    half = corner.new_empty(len(corner), corner[0].numel() + below[0].numel())
    half[:, : corner[0].numel()] = corner.flatten(1)
    half[:, corner[0].numel() :] = below.flatten(1)
    return half
