"""What rounding leaves outside of the span of gradients, which a damped inverse would enlarge."""

import torch
from torch import Tensor

# What rounding leaves, in units of the precision of the statistics. Chosen on gradients of real and
# random layers, with sides from 4 to 1024 and damping from 1e-2 to 1e-8, against float64.
NULL = 2.0  # of the largest eigenvalue: what is smaller may be a zero
MIXED = 0.2  # of an error of a factor, relative to its largest eigenvalue; 0.11 was seen
ROTATED = 8.0  # of the length of a rotated gradient


def without_rounding(x: Tensor, values: Tensor, damped: Tensor, dim: int) -> Tensor:
    """x in an eigenbasis, without what only rounding can have put where eigenvalues are 0.

    A gradient lies in the span of the factors that its own data make, and 1/λ would turn the
    rounding outside of it into a step. To first order, an error E of a factor F moves E·F⁺x of x to
    its null space: what is there and is not larger than for |E| = ε·max d counts as 0. What comes
    from where h is hardly above λ is divided by λ here as there, and may stay.
    x: [B, o, i]; values: eigenvalues along `dim`; damped: h.
    """
    other = -1 if dim == -2 else -2
    peak, eps = values.amax(1, keepdim=True), torch.finfo(x.dtype).eps
    null, reach = values <= NULL * eps * peak, damped.amax(other)
    curved = (1 - reach.amin(1, keepdim=True) / reach)[:, : values.size(1)]
    moved = torch.where(null, 0.0, curved * peak / torch.where(null, 1.0, values))
    # sums of squares along `dim`: where eigenvalues are 0, of what rounding moves there, of all
    weights = torch.stack([null.to(x), moved.square(), curved.square()], 1)  # [B, 3, n]
    squares = x.square()
    sums = weights @ squares if dim == -2 else weights @ squares.mT
    # rounding of the other side's rotation has the size of all columns, not of this one
    bound = torch.maximum(MIXED**2 * sums[:, 1], ROTATED**2 * sums[:, 2].mean(1, keepdim=True))
    dropped = null.unsqueeze(other) & (sums[:, 0] <= eps**2 * bound).unsqueeze(dim)
    return x.masked_fill(dropped, 0.0)


def thin_inverse(rotated: Tensor, basis: Tensor, damped: Tensor) -> Tensor:
    """Q [(QᵀN) ⊘ h] + (N − QQᵀN) ⊘ h₀. N: [B, o, i], Q: [B, o, k], h and h₀: [B, k + 1, i]"""
    inside, outside = damped[:, :-1], damped[:, -1:]
    inner = basis.mT @ rotated
    outer = rotated - basis @ inner
    # sums over many outputs have left some of the span in it: once more, and nothing is left
    again = basis.mT @ outer
    norms = [
        torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x in (rotated, outer, again)
    ]
    usual = norms[0].square().mean(1, keepdim=True).sqrt()
    least = ROTATED * torch.finfo(rotated.dtype).eps * torch.maximum(norms[0], usual)
    real = (norms[1].square() - norms[2].square() > least.square())[:, None]
    mixed = (inner + again) / inside - torch.where(real, again / outside, 0.0)
    return basis @ mixed + torch.where(real, outer / outside, 0.0)
