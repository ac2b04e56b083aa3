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


def heavy_ball_(velocity: Tensor, update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """B ← μB + P; returns B, or P + μB with Nesterov."""
    rate = group["momentum"]
    velocity.mul_(rate).add_(update)
    return update.add(velocity, alpha=rate) if group["nesterov"] else velocity
