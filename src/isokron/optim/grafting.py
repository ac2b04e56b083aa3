"""Grafting: one method's direction at another method's step length (Agarwal et al., 2002.11803).

P ← P · ‖D‖ / ‖P‖ per block, D the direction of a simple method kept beside the real one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.optim.moments import bias

TINY = 1e-100  # only keeps a zero direction from dividing by zero


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


def graft(direction: Tensor, length_of: Tensor) -> Tensor:
    """`direction` with, per block, the norm of `length_of`. [B, ...]"""
    return _scaled(direction, norms(length_of) / (norms(direction) + TINY))


def graft_together(
    directions: Sequence[Tensor], simple: Sequence[Tensor], owners: Sequence[Tensor]
) -> list[Tensor]:
    """As `graft`, with lengths taken over all blocks of a parameter, in whatever batches they are.

    directions, simple: one [B, ...] a batch; owners: one [B] a batch, which parameter a row is of,
    and −1 for rows that are left out.
    """
    owner = torch.cat(list(owners))
    taken = owner >= 0
    lengths = []
    for tensors in (directions, simple):
        squares = torch.cat([norms(tensor).cpu() for tensor in tensors]) ** 2
        total = torch.zeros(int(owner.max()) + 1, dtype=squares.dtype)
        lengths.append(total.index_add_(0, owner[taken], squares[taken]).sqrt())
    ratio = torch.ones(len(owner), dtype=lengths[0].dtype)
    ratio[taken] = (lengths[1] / (lengths[0] + TINY))[owner[taken]]
    parts = ratio.split([len(tensor) for tensor in directions])
    return [_scaled(tensor, part) for tensor, part in zip(directions, parts, strict=True)]


def norms(x: Tensor) -> Tensor:
    """Norm of every block, in float64: what a factor makes huge or tiny has a length too. [B]"""
    return torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor.to(x).view(-1, *[1] * (x.ndim - 1))
