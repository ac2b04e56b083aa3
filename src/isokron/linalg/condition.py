"""Condition numbers held below a bound by lifting small eigenvalues."""

from typing import NamedTuple

import torch
from torch import Tensor


class Lifted(NamedTuple):
    """Eigenvalues of at least λmax/κ. values: [..., k], rest: [..., 1], lifted: [...]"""

    values: Tensor
    rest: Tensor
    lifted: Tensor  # how many of the k + multiplicity eigenvalues were lifted


def lift(
    values: Tensor,
    max_condition: float,
    rest: Tensor | float = 0.0,
    multiplicity: int = 0,
) -> Lifted:
    """max(λ, λmax/κ), κ = `max_condition`, of eigenvalues in any order. values: [..., k]

    rest: one further eigenvalue, `multiplicity` times: that of what a low-rank part leaves alone.
    """
    if not max_condition >= 1:
        raise ValueError(f"max_condition must be at least 1, got {max_condition!r}")
    if multiplicity < 0:
        raise ValueError(f"multiplicity must be at least 0, got {multiplicity!r}")
    rest = torch.as_tensor(rest, dtype=values.dtype, device=values.device)
    rest = rest.expand(*values.shape[:-1], 1)
    known = torch.cat([values, rest], -1) if multiplicity or not values.size(-1) else values
    floor = known.amax(-1, keepdim=True).clamp(min=0) / max_condition
    lifted = (values < floor).sum(-1) + multiplicity * (rest < floor).squeeze(-1)
    return Lifted(torch.maximum(values, floor), torch.maximum(rest, floor), lifted)
