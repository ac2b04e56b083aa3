"""Gram matrices of every dimension of a batch of blocks, of which only half is ever new."""

from collections.abc import Iterator

from torch import Tensor

# A product cut into bands of rows, each up to the diagonal, does little more than half the work.
# It pays where bands are wide enough to run at the speed of a large product.
LEAST_BAND = 256
BANDS = 4


def unfold(x: Tensor, dim: int) -> Tensor:
    """Block dimension `dim` as rows, all others as columns. [B, d₁, …, dₖ] → [B, dᵢ, n/dᵢ]"""
    if dim == 0:
        return x.reshape(len(x), x.size(1), -1)
    if dim == x.ndim - 2:
        return x.reshape(len(x), -1, x.size(-1)).mT
    return x.movedim(dim + 1, 1).reshape(len(x), x.size(dim + 1), -1)


def gram_(cov: Tensor, x: Tensor, decay: float, weight: float) -> None:
    """cov ← decay·cov + weight·xxᵀ, but only on and below the diagonal. [B, d, d], [B, d, n]

    What stands above the diagonal afterwards has no meaning; `mirror_` gives it one.
    """
    bands = list(_bands(cov.size(-1)))
    if len(bands) == 1:
        cov.baddbmm_(x, x.mT, beta=decay, alpha=weight)
        return
    for one, rows_of in zip(cov, x, strict=True):  # a batched product would copy the windows
        for rows, cols in bands:
            one[rows, cols].addmm_(rows_of[rows], rows_of[cols].mT, beta=decay, alpha=weight)


def mirror_(cov: Tensor) -> Tensor:
    """Copy what is below the diagonal to above it. [B, d, d]"""
    for rows, _ in _bands(cov.size(-1)):
        square = cov[:, rows, rows]
        square.copy_(square.tril() + square.tril(-1).mT)
        left = slice(0, rows.start)
        cov[:, left, rows] = cov[:, rows, left].mT
    return cov


def _bands(size: int) -> Iterator[tuple[slice, slice]]:
    """Bands of rows, each with the columns up to its own last: a lower block triangle."""
    width = max(LEAST_BAND, -(-size // BANDS)) if size >= 2 * LEAST_BAND else max(size, 1)
    for start in range(0, size, width):
        stop = min(start + width, size)
        yield slice(start, stop), slice(0, stop)
