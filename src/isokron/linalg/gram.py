"""Products known to be symmetric, Gram matrices first of all: only half of them is ever new."""

from collections.abc import Iterator

from torch import Tensor

# A product cut into panels of columns, each from the diagonal down, does little more than half the
# work. Panels are as narrow as still run at the speed of a large product, and no more than PANELS.
LEAST_PANEL = 128
PANELS = 16


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
    _lower_(cov, x, x.mT, decay, weight)


def symmetric_product(
    left: Tensor,
    right: Tensor,
    start: Tensor | None = None,
    decay: float = 1.0,
    weight: float = 1.0,
) -> Tensor:
    """decay·start + weight·left·right where that is symmetric. [B, d, n], [B, n, d] → [B, d, d]

    XXᵀ is, and the product AB of symmetric matrices that commute.
    """
    if start is None:
        out, decay = left.new_empty(len(left), left.size(1), left.size(1)), 0.0
    else:
        out = start.clone()
    _lower_(out, left, right, decay, weight)
    _raise_(out)
    return out


def mirror_(cov: Tensor) -> Tensor:
    """Copy what is below the diagonal to above it. [B, d, d]"""
    for panel in _panels(cov.size(-1)):
        square = cov[:, panel, panel]
        square.copy_(square.tril() + square.tril(-1).mT)
    _raise_(cov)
    return cov


def _lower_(out: Tensor, left: Tensor, right: Tensor, decay: float, weight: float) -> None:
    """out ← decay·out + weight·left·right: panel by panel, from the square on the diagonal down."""
    panels = list(_panels(out.size(-1)))
    if len(panels) == 1:
        out.baddbmm_(left, right, beta=decay, alpha=weight)
        return
    for one, rows, columns in zip(out, left, right, strict=True):  # a batch would copy the windows
        for panel in panels:
            below = slice(panel.start, None)
            one[below, panel].addmm_(rows[below], columns[:, panel], beta=decay, alpha=weight)


def _raise_(out: Tensor) -> None:
    """Copy what is below the squares on the diagonal to the right of them."""
    for panel in _panels(out.size(-1)):
        below = slice(panel.stop, None)
        out[:, panel, below] = out[:, below, panel].mT


def _panels(size: int) -> Iterator[slice]:
    """Ranges of columns, one after the other; one for a matrix too small to be cut."""
    width = max(LEAST_PANEL, -(-size // PANELS)) if size >= 3 * LEAST_PANEL else max(size, 1)
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))
