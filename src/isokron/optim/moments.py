"""Exponential means of what has been seen, and what to divide a young one by."""

import math
from collections.abc import Mapping
from typing import Any

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


def filtered_(mean: Tensor, grad: Tensor, beta: float, beta3: float, step: Tensor) -> Tensor:
    """f = β₃M + (1−β₃)G, debiased by 1 − β₃β₁ᵗ⁻¹; then M ← β₁M + (1−β₁)G. β₃ = β₁: Adam's mean."""
    mixed = mean.lerp(grad, 1 - beta3)
    mean.lerp_(grad, 1 - beta)
    weight = 1 - beta3 * torch.pow(beta, step.double() - 1)  # in float32 off by 1e-5 near 1
    return mixed / weight.to(mixed.dtype)


def heavy_ball_(velocity: Tensor, update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """B ← μB + (1−d)P; returns B, or (1−d)P + μB with Nesterov."""
    rate, share = group["momentum"], 1 - group["dampening"]
    velocity.mul_(rate).add_(update, alpha=share)
    return (update * share).add_(velocity, alpha=rate) if group["nesterov"] else velocity
