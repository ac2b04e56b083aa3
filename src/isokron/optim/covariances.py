"""Second moments of a block along each of its dimensions, of which half is kept up to date.

F_i ← β F_i + (1−β) X_(i) X_(i)ᵀ, X_(i) the block with dimension i as rows; a plain sum at β = 1.
In the state they are "cov.0", "cov.1", …; sides without one have no factor.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from isokron.linalg import gram_, unfold
from isokron.optim.blocks import Batch
from isokron.optim.moments import corrected


def zero_covariances(
    batch: Batch, sides: Iterable[int], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    return {f"cov.{i}": torch.zeros_like(batch.eyes(batch.shape[i], dtype)) for i in sides}


def sides_of(state: Mapping[str, Tensor]) -> list[int]:
    return [int(key[4:]) for key in state if key.startswith("cov.")]


def observe_side_(cov: Tensor, x: Tensor, side: int, beta: float, scale: float = 1.0) -> None:
    """Fold x [B, ...] into the covariance of one of its sides, in place."""
    weight = scale * (1 - beta if beta < 1 else 1.0)
    gram_(cov, unfold(x.to(cov.dtype), side), beta, weight)


def debiased(
    state: Mapping[str, Tensor], side: int, beta: float, group: Mapping[str, Any]
) -> Tensor:
    """F̂ = F/(1−βᵗ), on and below the diagonal. [B, d, d]"""
    return corrected(state[f"cov.{side}"], beta, state, group)


def known_only(fresh: Tensor, key: str, state: Mapping[str, Tensor]) -> Tensor:
    """The new operator where a gradient has been seen, else the old: zeros say nothing. [B, ...]"""
    trace = state[f"cov.{key.rpartition('.')[2]}"].diagonal(dim1=-2, dim2=-1).sum(-1)
    known = (trace != 0).view(-1, *[1] * (fresh.ndim - 1))
    return torch.where(known, fresh.to(state[key].dtype), state[key])
