"""Factors: symmetric positive matrices that act on one dimension of a block."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


def multiply(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """x ×_dim A: y[.., i, ..] = Σ_j A[i, j] x[.., j, ..]. x: [B..., d1..dk], A: [B..., m, n].

    `dim` is negative. A need not be symmetric; x and A have the same batch dimensions.
    """
    batch = matrix.ndim - 2
    axis = x.ndim + dim
    if dim >= 0 or axis < batch or x.shape[:batch] != matrix.shape[:-2]:
        raise ValueError(
            f"multiply needs x [B..., d1..dk], matrix [B..., m, n] and dim from -k to -1, "
            f"got shapes {tuple(x.shape)}, {tuple(matrix.shape)} and dim {dim}"
        )
    lead, before, after = x.shape[:batch], x.shape[batch:axis], x.shape[axis + 1 :]
    rows, n = matrix.shape[-2], x.shape[axis]
    # for the first and the last dimension a reshape without a copy gives one product per batch row
    if not before:
        y = torch.matmul(matrix, x.reshape(*lead, n, prod(after)))
    elif not after:
        y = torch.matmul(x.reshape(*lead, prod(before), n), matrix.mT)
    else:
        moved = x.movedim(axis, batch)
        y = torch.matmul(matrix, moved.reshape(*lead, n, prod(before) * prod(after)))
        y = y.view(*lead, rows, *before, *after).movedim(batch, axis).contiguous()
    return y.reshape(*lead, *before, rows, *after)


def along(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """values [B..., n] as [B..., 1.., n, ..1], to scale x [B..., d1..dk] along `dim`."""
    shape = [1] * (x.ndim - values.ndim + 1)
    shape[dim] = values.shape[-1]
    return values.reshape(*values.shape[:-1], *shape)


@dataclass(frozen=True)
class Identity:
    """I of any size."""

    def apply(self, x: Tensor, dim: int) -> Tensor:
        return x

    def to_dense(self, n: int | None = None) -> Tensor:
        """I in float64 on the CPU."""
        if n is None:
            raise ValueError("Identity has no size of its own; give to_dense the size n")
        return torch.eye(n, dtype=torch.float64)


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


@dataclass(frozen=True, eq=False)
class Eigen:
    """Q diag(values) Qᵀ with orthogonal Q. values: [..., n], basis Q: [..., n, n]"""

    values: Tensor
    basis: Tensor

    def apply(self, x: Tensor, dim: int) -> Tensor:
        rotated = multiply(x, self.basis.mT, dim)
        return multiply(rotated * along(self.values, x, dim), self.basis, dim)

    def to_dense(self, n: int | None = None) -> Tensor:
        return (self.basis * self.values.unsqueeze(-2)) @ self.basis.mT
