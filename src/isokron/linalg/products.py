"""Products of blocks along a dimension, and symmetric products by one of their triangles."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

# A product cut into column panels, each from the diagonal down, takes little more than half the
# work. Narrower panels than MIN_PANEL run below the speed of a large product; more panels than
# MAX_PANELS save hardly anything.
MIN_PANEL = 128
MAX_PANELS = 16


def multiply(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """x ×_dim A: y[.., i, ..] = Σ_j A[i, j] x[.., j, ..]. x: [B..., d1..dk], A: [B..., m, n].

    `dim` is negative. A need not be symmetric; x and A have the same batch dimensions.
    """
    batch = matrix.ndim - 2
    axis = x.ndim + dim
    if dim >= 0 or axis < batch or x.shape[:batch] != matrix.shape[:-2]:
        raise ValueError(
            f"multiply needs x [B..., d1..dk], matrix [B..., m, n] and dim from -k to -1, "
            f"got shapes {tuple(x.shape)}, {tuple(matrix.shape)} and dim {dim}"
        )
    lead, before, after = x.shape[:batch], x.shape[batch:axis], x.shape[axis + 1 :]
    rows, n = matrix.shape[-2], x.shape[axis]
    # for the first and the last dimension a reshape without a copy gives one product per batch row
    if not before:
        y = torch.matmul(matrix, x.reshape(*lead, n, prod(after)))
    elif not after:
        y = torch.matmul(x.reshape(*lead, prod(before), n), matrix.mT)
    else:
        moved = x.movedim(axis, batch)
        y = torch.matmul(matrix, moved.reshape(*lead, n, prod(before) * prod(after)))
        y = y.view(*lead, rows, *before, *after).movedim(batch, axis).contiguous()
    return y.reshape(*lead, *before, rows, *after)


def along(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """values [B..., n] as [B..., 1.., n, ..1], to scale x [B..., d1..dk] along `dim`."""
    shape = [1] * (x.ndim - values.ndim + 1)
    shape[dim] = values.shape[-1]
    return values.reshape(*values.shape[:-1], *shape)


def unfold(x: Tensor, dim: int) -> Tensor:
    """Block dimension `dim` as rows, the others as columns. [B, d₁, …, dₖ] → [B, dᵢ, n/dᵢ]"""
    # the first and the last dimension need no copy
    if dim == 0:
        return x.reshape(len(x), x.size(1), -1)
    if dim == x.ndim - 2:
        return x.reshape(len(x), -1, x.size(-1)).mT
    return x.movedim(dim + 1, 1).reshape(len(x), x.size(dim + 1), -1)


def gram_(cov: Tensor, x: Tensor, decay: float, weight: float) -> None:
    """cov ← decay·cov + weight·xxᵀ, on and below the diagonal. cov: [B, d, d], x: [B, d, n]

    Entries above the diagonal are undefined afterwards; `mirror_` fills them in.
    """
    if x.requires_grad and torch.is_grad_enabled():  # unrolled training
        cov.mul_(decay).add_(x @ x.mT, alpha=weight)
    else:
        _multiply_lower_(cov, x, x.mT, decay, weight)


def symmetric_product(
    left: Tensor,
    right: Tensor,
    start: Tensor | None = None,
    decay: float = 1.0,
    weight: float = 1.0,
) -> Tensor:
    """decay·start + weight·left·right, which must be symmetric. [B, d, n], [B, n, d] → [B, d, d]

    XXᵀ is symmetric, and so is the product of symmetric matrices that commute.
    """
    if start is None:
        product, decay = left.new_empty(len(left), left.size(1), left.size(1)), 0.0
    else:
        product = start.clone()
    _multiply_lower_(product, left, right, decay, weight)
    _copy_below_to_right_(product)
    return product


def mirror_(cov: Tensor) -> Tensor:
    """Copy the lower triangle to the upper one. [B, d, d]"""
    for panel in _panels(cov.size(-1)):
        square = cov[:, panel, panel]
        square.copy_(square.tril() + square.tril(-1).mT)
    _copy_below_to_right_(cov)
    return cov


def halved(matrix: Tensor) -> Tensor:
    """Pack column panels from the diagonal down, for communication. [B, d, d] → [B, about d²/2]"""
    panels = _panels(matrix.size(-1), least=1)
    return torch.cat([matrix[:, panel.start :, panel].flatten(1) for panel in panels], 1)


def unhalve_(matrix: Tensor, half: Tensor) -> Tensor:
    """Unpack `half` into the lower triangle; entries above the diagonal are undefined."""
    views = [matrix[:, panel.start :, panel] for panel in _panels(matrix.size(-1), least=1)]
    parts = half.split([view[0].numel() for view in views], 1)
    for view, part in zip(views, parts, strict=True):
        view.copy_(part.view_as(view))
    return matrix


def _multiply_lower_(
    product: Tensor, left: Tensor, right: Tensor, decay: float, weight: float
) -> None:
    """product ← decay·product + weight·left·right, on and below the diagonal squares."""
    panels = list(_panels(product.size(-1)))
    if len(panels) == 1:
        product.baddbmm_(left, right, beta=decay, alpha=weight)
        return
    # matrix by matrix: baddbmm_ would copy panels that are not contiguous
    for target, rows, columns in zip(product, left, right, strict=True):
        for panel in panels:
            below = slice(panel.start, None)
            target[below, panel].addmm_(rows[below], columns[:, panel], beta=decay, alpha=weight)


def _copy_below_to_right_(matrix: Tensor) -> None:
    """Copy the entries below the diagonal squares to the right of them."""
    for panel in _panels(matrix.size(-1)):
        below = slice(panel.stop, None)
        matrix[:, panel, below] = matrix[:, below, panel].mT


def _panels(size: int, least: int = MIN_PANEL) -> Iterator[slice]:
    """Column ranges of at least `least`; a single one for a matrix too small to be cut."""
    width = max(least, -(-size // MAX_PANELS)) if size >= 3 * least else max(size, 1)
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))
