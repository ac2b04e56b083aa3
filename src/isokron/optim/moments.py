"""Exponential means of what has been seen, and what to divide a young one by."""

import math

import torch
from torch import Tensor


def bias(beta: float, step: Tensor) -> Tensor:
    """1 − βᵗ, the weight a mean that started at zero has gathered in t steps.

    By expm1: in float32 the plain form is off by 1e-5 at β = 0.999, t = 1.
    """
    return -torch.expm1(step * math.log(beta)) if beta > 0 else torch.ones_like(step)


def first_moment_(
    mean: Tensor, grad: Tensor, beta: float, nesterov: bool, step: Tensor | None
) -> Tensor:
    """M ← βM + (1−β)G; returns M, or (1−β)G + βM with Nesterov; debiased where `step` is given."""
    mean.lerp_(grad, 1 - beta)
    moment = grad.lerp(mean, beta) if nesterov else mean
    # Nesterov's look-ahead weighs the gradients as one step later: (1−β) + β(1−βᵗ) = 1 − βᵗ⁺¹
    return moment if step is None else moment / bias(beta, step + 1 if nesterov else step)
