"""Grafting: one method's direction at another method's step length (Agarwal et al., 2002.11803).

P ← P · ‖D‖ / ‖P‖ per block, D the direction of a simple method kept beside the real one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.linalg import sent
from isokron.optim.moments import corrected, second_moment_

TINY = 1e-100  # only keeps a zero direction from dividing by zero


def graft_direction(
    grad: Tensor, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
) -> Tensor:
    """D = m for SGD, else m / (√v + ε): AdaGrad's sum, RMSprop's mean, Adam's debiased mean.

    `state["graft"]` holds v and is updated in place; β₂ = 1 makes all of them AdaGrad's sum. All:
    [B, ...].
    """
    kind = group["graft"]
    if kind == "sgd":
        return moment
    second, beta2 = state["graft"], group["betas"][1]
    if kind == "adagrad":
        second.addcmul_(grad, grad)
    else:
        second_moment_(second, grad, beta2)
    if kind == "adam":
        second = corrected(second, beta2, state, group)
    return moment / (second.sqrt() + group["eps"])


def graft(direction: Tensor, length_of: Tensor) -> Tensor:
    """`direction` with, per block, the norm of `length_of`. [B, ...]"""
    return _scaled(direction, norms(length_of) / (norms(direction) + TINY))


def sums_by_owner(values: Sequence[Tensor], owners: Sequence[int]) -> Tensor:
    """For every row the sum over all rows with its owner. values: one [B] a batch → [ΣB]

    On the device of the first batch.
    """
    device = values[0].device
    joined = torch.cat([sent(value, device) for value in values])
    owner = sent(torch.tensor(owners, device="cpu"), device)
    total = joined.new_zeros(max(owners) + 1)
    if joined.is_cpu:
        total.index_add_(0, owner, joined)
    else:  # which CUDA adds up in a fixed order, unlike index_add_
        total.index_put_((owner,), joined, accumulate=True)
    return total[owner]


def norms(x: Tensor) -> Tensor:
    """Norm of every block, in float64: what a factor makes huge or tiny has a length too. [B]"""
    return torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor.to(x).view(-1, *[1] * (x.ndim - 1))
