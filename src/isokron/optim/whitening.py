"""Factors Q, learned so that P G = QlᵀQl G QrᵀQr is white. Blocks: [B, m, n] or [B, n].

A side's factor is dense, [B, n, n], or diagonal, [B, n]; L, [B], bounds the steps it takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from isokron.linalg import norm_bound, surely_all, symmetric_product
from isokron.operators import along, multiply
from isokron.white_kron import GOLDEN, GROWTH_LIMIT, SQUARE_LIMIT, uniform

Probes = Callable[[int], Tensor]  # n ↦ [..., k, n]


class Pull:
    """M = I − z(T − t₂I), T = WWᵀ: what draws a factor to where P whitens. W: [B, n, k], z: [B]"""

    def __init__(self, white: Tensor, gram: Tensor, rate: Tensor) -> None:
        self.rate = rate[:, None, None]
        self.grow = 1 + self.rate * white.size(2)  # M X = (1 + z t₂) X − z T X
        # multiplying by a thin W twice is cheaper than by T once
        self.thin = white if 2 * white.size(2) < white.size(1) else None
        if self.thin is None:
            self.matrix = gram.mul_(-self.rate)
            self.matrix.diagonal(dim1=1, dim2=2).add_(self.grow[:, 0])

    def before(self, factor: Tensor) -> Tensor:
        """M Q"""
        if self.thin is None:
            return self.matrix @ factor
        return (self.grow * factor).baddbmm_(self.rate * self.thin, self.thin.mT @ factor, alpha=-1)

    def around(self, factor: Tensor) -> Tensor:
        """M Q M, symmetric as Q is."""
        half = self.before(factor)
        if self.thin is None:
            whole = half @ self.matrix
        else:
            drawn = self.rate * (half @ self.thin)
            whole = (self.grow * half).baddbmm_(drawn, self.thin.mT, alpha=-1)
        return whole.lerp(whole.mT, 0.5)


class Learner(Protocol):
    """How a method moves a factor, the step being z = `pace`·plr/L."""

    symmetric: ClassVar[bool]
    pace: ClassVar[float]

    def move_dense(self, factor: Tensor, pull: Pull, probes: Tensor) -> Tensor:
        """[B, n, n]"""
        ...

    def move_diagonal(self, factor: Tensor, pull: Tensor) -> Tensor:
        """`pull`: the diagonal of M. [B, n]"""
        ...


def whiten(blocks: Tensor, factors: Sequence[Tensor], symmetric: bool) -> Tensor:
    """P G. A symmetric Q is its own transpose."""
    for dim, factor in enumerate(factors, -len(factors)):
        if factor.ndim == 2:
            blocks = blocks * along(factor.square(), blocks, dim)
        else:
            back = factor if symmetric else factor.mT
            blocks = multiply(multiply(blocks, factor, dim), back, dim)
    return blocks


@dataclass(frozen=True)
class Sides:
    """What is kept of the sides of a batch: one factor and one L each."""

    factors: list[Tensor]
    lipschitz: list[Tensor]


def learned(
    learner: Learner, white: Tensor, sides: Sides, plr: Tensor, probes: Probes, limit: float
) -> Sides:
    """The sides after one step on W = PG; blocks that show nothing at all keep theirs.

    T = WWᵀ, t₂ = n on the left; T = WᵀW, t₂ = m on the right; their diagonals for a diagonal Q.
    ℓ = ‖T‖₂ + t₂ and L ← max(0.95L + 0.05ℓ, ℓ). plr: [B].
    """
    largest = white.abs().flatten(1).amax(1)
    shown = largest > 0
    usual = surely_all(shown & (largest <= SQUARE_LIMIT))
    if not usual:  # so that the squares of whatever is finite are
        white = _times(white, SQUARE_LIMIT / largest.clamp_min(SQUARE_LIMIT))
    white = white if white.ndim == 3 else white.unsqueeze(2)
    scale = largest.clamp_max(SQUARE_LIMIT).square()
    result = Sides([], [])
    for i, (factor, lipschitz) in enumerate(zip(sides.factors, sides.lipschitz, strict=True)):
        seen = white.mT if i else white
        if factor.ndim == 2:
            squares = seen.square().sum(2)
            bound = _grown(lipschitz, squares.amax(1) + seen.size(2))
            rate = (learner.pace * plr / bound)[:, None]
            moved = learner.move_diagonal(factor, 1 - rate * (squares - seen.size(2)))
        else:
            gram = symmetric_product(seen, seen.mT)
            starts = probes(factor.size(1))
            bound = _grown(lipschitz, norm_bound(gram, scale, starts) + seen.size(2))
            moved = learner.move_dense(factor, Pull(seen, gram, learner.pace * plr / bound), starts)
        moved.clamp_(-limit, limit)
        if not usual:
            moved = torch.where(shown.view(-1, *[1] * (factor.ndim - 1)), moved, factor)
            bound = torch.where(shown, bound, lipschitz)
        result.factors.append(moved)
        result.lipschitz.append(bound)
    return result


def _grown(lipschitz: Tensor, steepness: Tensor) -> Tensor:
    return torch.maximum(0.95 * lipschitz + 0.05 * steepness, steepness)


def balance_(factors: Sequence[Tensor], due: Tensor) -> None:
    """Scale Ql and Qr, where it is due, so that max|Ql| = max|Qr|; P stays. due: [B]"""
    if len(factors) != 2 or surely_all(~due):
        return
    left, right = (factor.abs().flatten(1).amax(1) for factor in factors)
    known = due & (left > 0) & (right > 0)
    scale = torch.where(known, right / left, 1).sqrt()
    for factor, by in zip(factors, (scale, 1 / scale), strict=True):
        factor.copy_(_times(factor, by))


def _times(blocks: Tensor, by: Tensor) -> Tensor:
    """Each block times its number. [B, ...], [B]"""
    return blocks * by.view(-1, *[1] * (blocks.ndim - 1))


def growth_limit(apply: str, noise_scale: float, sides: int) -> float:
    """Of the entries of Q. With "old" factors noise would be in the direction, and a parameter
    without gradients would drift: P is kept below 1/noise_scale there, as noise would."""
    if apply == "new" or noise_scale == 0:
        return GROWTH_LIMIT
    return min(GROWTH_LIMIT, noise_scale ** (-0.5 / sides))


def fixed_numbers(shape: Sequence[int], like: Tensor) -> Tensor:
    """white_kron.uniform of white_kron.scramble: mean square 1, of full rank. [m, n] or [n]

    (i+1)(j+1)(i+j+1) = (i+1)²(j+1) + (i+1)·j(j+1), in integers of 32 bits that wrap around.
    """
    column = torch.arange(shape[-1], device=like.device)
    rows = shape[0] if len(shape) == 2 else 1
    row = torch.arange(1, rows + 1, device=like.device)[:, None]
    bits = _low(row * row) * _low((column + 1) * GOLDEN)
    bits += _low(row) * _low(column * (column + 1) * GOLDEN)
    unsigned = bits.to(like.dtype)
    return uniform(torch.where(bits < 0, unsigned + 2.0**32, unsigned)).view(*shape)


def _low(numbers: Tensor) -> Tensor:
    """The lower 32 bits, as a signed integer."""
    return (((numbers + 2**31) & (2**32 - 1)) - 2**31).to(torch.int32)
