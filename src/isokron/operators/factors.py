"""Factors: symmetric positive matrices that act on one dimension of a block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from isokron.linalg import along, multiply


@dataclass(frozen=True)
class Identity:
    """I of any size."""

    def apply(self, x: Tensor, dim: int) -> Tensor:
        return x

    def to_dense(self, n: int | None = None) -> Tensor:
        """I in float64 on the CPU."""
        if n is None:
            raise ValueError("Identity has no size of its own; give to_dense the size n")
        return torch.eye(n, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, eq=False)
class Diagonal:
    """diag(values). values: [..., n]"""

    values: Tensor

    def apply(self, x: Tensor, dim: int) -> Tensor:
        return x * along(self.values, x, dim)

    def to_dense(self, n: int | None = None) -> Tensor:
        return torch.diag_embed(self.values)


@dataclass(frozen=True, eq=False)
class Dense:
    """A symmetric matrix. matrix: [..., n, n]"""

    matrix: Tensor

    def apply(self, x: Tensor, dim: int) -> Tensor:
        return multiply(x, self.matrix, dim)

    def to_dense(self, n: int | None = None) -> Tensor:
        return self.matrix


@dataclass(frozen=True, eq=False)
class CholeskyInverse:
    """(LLᵀ)⁻¹, applied by two triangular solves. lower L: [..., n, n]

    Forming the inverse would take six times as long as the Cholesky factorization.
    """

    lower: Tensor

    def apply(self, x: Tensor, dim: int) -> Tensor:
        batch = self.lower.ndim - 2
        columns = x.movedim(dim, batch)  # [B..., n, ...]
        flat = columns.reshape(*columns.shape[: batch + 1], -1).to(self.lower.dtype)
        solved = torch.cholesky_solve(flat, self.lower)
        return solved.view(columns.shape).movedim(batch, dim).to(x.dtype)

    def to_dense(self, n: int | None = None) -> Tensor:
        return torch.cholesky_inverse(self.lower)
