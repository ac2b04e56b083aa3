"""Operators on blocks, with one factor or basis per dimension."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from isokron.linalg import multiply
from isokron.operators.factors import CholeskyInverse, Dense, Diagonal, Identity
from isokron.operators.low_rank import LowRank

Factor = Identity | Diagonal | Dense | CholeskyInverse | LowRank


@dataclass(frozen=True, eq=False)
class Kron:
    """F_1 ⊗ … ⊗ F_k acts on X as X ×_1 F_1 … ×_k F_k. X: [..., d1..dk]"""

    factors: tuple[Factor, ...]

    def apply(self, x: Tensor) -> Tensor:
        for dim, factor in enumerate(self.factors, -len(self.factors)):
            x = factor.apply(x, dim)
        return x

    def to_dense(self, shape: Sequence[int] | None = None) -> Tensor:
        """The matrix on row-major vec(X). shape: of a block, needed if a factor is Identity."""
        sizes = [None] * len(self.factors) if shape is None else shape[-len(self.factors) :]
        sides = [factor.to_dense(n) for factor, n in zip(self.factors, sizes, strict=True)]
        # Identity has no tensor, so its dtype and device are those of another factor
        pairs = zip(sides, self.factors, strict=True)
        like = next((side for side, factor in pairs if not isinstance(factor, Identity)), sides[0])
        return reduce(_kron, [side.to(like) for side in sides])


@dataclass(frozen=True, eq=False)
class KronEigen:
    """Q diag(Λ) Qᵀ with Q = Q_1 ⊗ … ⊗ Q_k and any Λ. bases: [..., d, d], or None for I."""

    bases: tuple[Tensor | None, ...]
    eigenvalues: Tensor  # [..., d1..dk]

    def rotate(self, x: Tensor) -> Tensor:
        """Qᵀx: into the basis."""
        for dim, basis in enumerate(self.bases, -len(self.bases)):
            x = x if basis is None else multiply(x, basis.mT, dim)
        return x

    def unrotate(self, x: Tensor) -> Tensor:
        """Qx: out of the basis."""
        for dim, basis in enumerate(self.bases, -len(self.bases)):
            x = x if basis is None else multiply(x, basis, dim)
        return x

    def apply(self, x: Tensor) -> Tensor:
        return self.unrotate(self.eigenvalues * self.rotate(x))

    def to_dense(self) -> Tensor:
        """The matrix on row-major vec(X)."""
        order, values = len(self.bases), self.eigenvalues
        pairs = zip(self.bases, values.shape[-order:], strict=True)
        sides = [
            torch.eye(n, dtype=values.dtype, device=values.device) if basis is None else basis
            for basis, n in pairs
        ]
        basis = reduce(_kron, sides)
        return (basis * values.flatten(-order).unsqueeze(-2)) @ basis.mT


@dataclass(frozen=True, eq=False)
class ScaledKron:
    """D^½ K D^½ with D^½ = diag(S): x ↦ S ⊙ K(S ⊙ x).

    scale S: standard deviations [..., d1..dk]; kron K: correlations.
    """

    scale: Tensor
    kron: Kron

    def apply(self, x: Tensor) -> Tensor:
        return self.scale * self.kron.apply(self.scale * x)

    def to_dense(self) -> Tensor:
        """The matrix on row-major vec(X)."""
        order = len(self.kron.factors)
        scale = self.scale.flatten(-order)
        inner = self.kron.to_dense(self.scale.shape[-order:]).to(scale)
        return scale.unsqueeze(-1) * inner * scale.unsqueeze(-2)


def _kron(left: Tensor, right: Tensor) -> Tensor:
    """A ⊗ B, batched: [..., m, m], [..., n, n] → [..., mn, mn]."""
    product = left[..., :, None, :, None] * right[..., None, :, None, :]
    return product.flatten(-2).flatten(-3, -2)
