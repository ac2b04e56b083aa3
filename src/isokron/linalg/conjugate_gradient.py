"""Preconditioned conjugate gradients for many right-hand sides (Hestenes & Stiefel 1952)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Vectors = dict[str, Tensor]  # the parts of Q vectors by name: [B, Q, ...]
TINY = 1e-300


class Solution(NamedTuple):
    """x with Ax ≈ b, and relative residuals ‖b − Ax‖/‖b‖, [Q]: of Pb ("before") and of x ("after").

    products: how many products with A were made.
    """

    vectors: Vectors
    before: Tensor
    after: Tensor
    products: int


def conjugate_gradient(
    product: Callable[[Vectors], Vectors],
    precondition: Callable[[Vectors], Vectors],
    rhs: Vectors,
    steps: int,
    *,
    tolerance: float = 0.0,
    agreed: Callable[[bool], bool] = bool,
) -> Solution:
    """Solve Ax = b for Q right-hand sides at once, each with step sizes of its own.

    Starts from 0: the first step gives the best multiple of Pb, with the one product that the
    residual of Pb would cost. A right-hand side is left alone once its residual is at most
    `tolerance`, and all are done when none is above it.

    Args:
        product: v → Av, A symmetric and positive definite.
        precondition: v → Pv, P ≈ A⁻¹ symmetric and positive semidefinite.
        rhs: b.
        steps: most products with A, at least 1.
        tolerance: relative residual at which to stop.
        agreed: turns the decision to stop into that of all processes that share the product.
    """
    residual = dict(rhs)
    solution = {name: torch.zeros_like(value) for name, value in rhs.items()}
    norm = inner(rhs, rhs).sqrt().clamp_min(TINY)
    direction = precondition(residual)
    slope = inner(residual, direction)
    before = after = torch.ones_like(norm)
    count = 0
    for count in range(1, steps + 1):
        image = product(direction)
        if count == 1:
            start = {name: rhs[name] - image[name] for name in rhs}
            before = inner(start, start).sqrt() / norm
        bend = inner(direction, image)
        active = (after > tolerance) & (bend > 0)
        length = torch.where(active, slope / bend.where(active, 1.0), 0.0)
        for name in rhs:
            size = _along(length, rhs[name])
            solution[name] += size * direction[name]
            # not in place: the direction may be the residual itself
            residual[name] = residual[name] - size * image[name]
        after = inner(residual, residual).sqrt() / norm
        if count == steps or agreed(not bool((active & (after > tolerance)).any())):
            break
        del image
        preconditioned = precondition(residual)
        previous, slope = slope, inner(residual, preconditioned)
        ratio = slope / previous.where(previous > 0, 1.0)
        for name, value in preconditioned.items():
            direction[name] = value + _along(ratio, value) * direction[name]
    return Solution(solution, before, after, count)


def inner(left: Vectors, right: Vectors) -> Tensor:
    """⟨l, r⟩ of every pair, summed in float64: [Q]"""
    parts = [
        (value * right[name]).movedim(1, 0).flatten(1).sum(1, dtype=torch.float64)
        for name, value in left.items()
    ]
    return torch.stack(parts).sum(0)


def _along(values: Tensor, like: Tensor) -> Tensor:
    """Values [Q] in the dtype of vectors, to scale them [B, Q, ...]."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.ndim - 2))
