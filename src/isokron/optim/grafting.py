"""Grafting: one method's direction at another method's step length (Agarwal et al., 2002.11803).

P ← P · ‖D‖ / ‖P‖ per block, D the direction of a simple method kept beside the real one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.optim.moments import bias

TINY = 1e-30  # only keeps a zero direction from dividing by zero


def graft_direction(
    grad: Tensor, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
) -> Tensor:
    """D = m for SGD, else m / (√v + ε): AdaGrad's sum, RMSprop's mean, Adam's debiased mean.

    `state["graft"]` holds v and is updated in place. All: [B, ...].
    """
    kind = group["graft"]
    if kind == "sgd":
        return moment
    second, beta2 = state["graft"], group["betas"][1]
    if kind == "adagrad":
        second.addcmul_(grad, grad)
    else:
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if kind == "adam":
        second = second / bias(beta2, state["step"])
    return moment / (second.sqrt() + group["eps"])


def rescale_(updates: Sequence[Tensor], simple: Sequence[Tensor], owner: Sequence[Tensor]) -> None:
    """Give the rows of all updates, parameter by parameter, the norm of the simple ones' rows.

    updates, simple: one [B, ...] a batch; owner: one [B] a batch, which parameter a row is of.
    """
    owners = torch.cat(list(owner))
    squares = []
    for tensors in (updates, simple):
        norms = torch.cat([torch.linalg.vector_norm(t.flatten(1), dim=1).cpu() for t in tensors])
        total = torch.zeros(int(owners.max()) + 1, dtype=torch.float64)
        squares.append(total.index_add_(0, owners, norms.double() ** 2))
    ratio = (squares[1].sqrt() / (squares[0].sqrt() + TINY))[owners]
    for update, part in zip(updates, ratio.split([len(t) for t in updates]), strict=True):
        update.mul_(part.to(update).view(-1, *[1] * (update.ndim - 1)))


def graft(direction: Tensor, length_of: Tensor) -> Tensor:
    """`direction` with, per block, the norm of `length_of`. [B, ...]"""
    dims = tuple(range(1, direction.ndim))
    norm = torch.linalg.vector_norm(direction, dim=dims, keepdim=True)
    target = torch.linalg.vector_norm(length_of, dim=dims, keepdim=True)
    return direction * (target / (norm + TINY))
