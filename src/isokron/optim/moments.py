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


def second_moment_(mean: Tensor, x: Tensor, beta: float) -> None:
    """V ← βV + (1−β)X², in place; AdaGrad's sum V ← V + X² at β = 1."""
    mean.mul_(beta).addcmul_(x, x, value=1 - beta if beta < 1 else 1.0)


def corrected(
    mean: Tensor, beta: float, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> Tensor:
    """V̂ = V/(1−βᵗ); V itself where it is a sum, or where bias is not to be corrected."""
    if beta == 1 or not group["use_bias_correction"]:
        return mean
    return mean / bias(beta, state["step"].view(-1, *[1] * (mean.ndim - 1))).to(mean.dtype)


def counted(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor | None:
    """The steps by which first moments are debiased; None where they are not to be."""
    return state["step"] if group["use_bias_correction"] else None


def first_moment_(
    mean: Tensor, grad: Tensor, beta: float, nesterov: bool, step: Tensor | None
) -> Tensor:
    """M ← βM + (1−β)G; returns M, or (1−β)G + βM with Nesterov; debiased where `step` is given."""
    mean.lerp_(grad, 1 - beta)
    moment = grad.lerp(mean, beta) if nesterov else mean
    # Nesterov's look-ahead weighs the gradients as one step later: (1−β) + β(1−βᵗ) = 1 − βᵗ⁺¹
    return moment if step is None else moment / bias(beta, step + 1 if nesterov else step)


def filtered_(mean: Tensor, grad: Tensor, beta: float, beta3: float, step: Tensor | None) -> Tensor:
    """f = β₃M + (1−β₃)G, debiased by 1 − β₃β₁ᵗ⁻¹ where `step` is given; then M ← β₁M + (1−β₁)G.

    β₃ = β₁: Adam's mean."""
    mixed = mean.lerp(grad, 1 - beta3)
    mean.lerp_(grad, 1 - beta)
    if step is None:
        return mixed
    weight = 1 - beta3 * torch.pow(beta, step.double() - 1)  # in float32 off by 1e-5 near 1
    return mixed / weight.to(mixed.dtype)


def heavy_ball_(velocity: Tensor, update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """B ← μB + (1−d)P; returns B, or (1−d)P + μB with Nesterov."""
    rate, share = group["momentum"], 1 - group["dampening"]
    velocity.mul_(rate).add_(update, alpha=share)
    return (update * share).add_(velocity, alpha=rate) if group["nesterov"] else velocity
