"""Operators on blocks, with one factor or basis per dimension."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from isokron.linalg import multiply
from isokron.operators.factors import CholeskyInverse, Dense, Diagonal, Identity
from isokron.operators.low_rank import LowRank, add_product_, inner_product

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
    """Q diag(Λ) Qᵀ with Q = Q_1 ⊗ … ⊗ Q_k and any Λ. bases: [..., d, d], or None for I.

    The first basis may be thin, [..., o, r] with r < o. Λ then has r + 1 rows: the last is that of
    the o − r directions outside of it, and of zero columns of the basis, which have a row as well.
    """

    bases: tuple[Tensor | None, ...]
    eigenvalues: Tensor  # [..., d1..dk]

    @property
    def thin(self) -> bool:
        return is_thin(self.bases[0])

    @property
    def copies(self) -> Tensor:
        """How many directions each row of Λ stands for: [r + 1, 1..], or ones."""
        left, order = self.bases[0], len(self.bases)
        copies = torch.ones(self.eigenvalues.size(-order), *[1] * (order - 1))
        if left is not None and self.thin:
            copies[-1] = left.size(-2) - left.size(-1)
        return copies.to(self.eigenvalues)

    def rotate(self, x: Tensor) -> Tensor:
        """Qᵀx: into the basis. A thin one has a last row, of lengths of what is outside of it."""
        left, order = self.bases[0], len(self.bases)
        if left is None or not self.thin:
            for dim, basis in enumerate(self.bases, -order):
                x = x if basis is None else multiply(x, basis.mT, dim)
            return x
        x = self._rotate_others(x)
        inner = inner_product(left, x, -order)
        squares = [part.square().sum(-order, keepdim=True) for part in (x, inner)]
        return torch.cat([inner, (squares[0] - squares[1]).clamp_min(0).sqrt()], -order)

    def unrotate(self, x: Tensor) -> Tensor:
        """Qx: out of the basis."""
        for dim, basis in enumerate(self.bases, -len(self.bases)):
            x = x if basis is None else multiply(x, basis, dim)
        return x

    def apply(self, x: Tensor) -> Tensor:
        left, dim = self.bases[0], -len(self.bases)
        if left is None or not self.thin:
            return self.unrotate(self.eigenvalues * self.rotate(x))
        # Q [Λ ⊙ QᵀX] + (X − QQᵀX) ⊙ λ₀: no difference of large eigenvalues
        x = self._rotate_others(x)
        inner, outer = inner_product(left, x, dim), x.clone()
        add_product_(outer, left, inner, dim, -1.0)
        inside, outside = self.eigenvalues.split([left.size(-1), 1], dim)
        outer = outer * outside
        add_product_(outer, left, inside * inner, dim, 1.0)
        return KronEigen((None, *self.bases[1:]), self.eigenvalues).unrotate(outer)

    def _rotate_others(self, x: Tensor) -> Tensor:
        """Into the bases of all dimensions but the first."""
        for dim, basis in enumerate(self.bases[1:], 1 - len(self.bases)):
            x = x if basis is None else multiply(x, basis.mT, dim)
        return x

    def completed(self) -> "KronEigen":
        """The same with a full first basis, [..., o, o]."""
        left, order = self.bases[0], len(self.bases)
        if left is None or not self.thin:
            return self
        left = left.to(self.eigenvalues)
        last = torch.linalg.vector_norm(left, dim=-2).argsort(dim=-1, descending=True)
        inside, outside = self.eigenvalues.split([left.size(-1), 1], -order)
        basis = torch.linalg.qr(left.gather(-1, last.unsqueeze(-2).expand_as(left)), "complete").Q
        rows = last.view(*last.shape, *[1] * (order - 1)).expand_as(inside)
        beyond = [outside] * (left.size(-2) - left.size(-1))
        values = torch.cat([inside.gather(-order, rows), *beyond], -order)
        return KronEigen((basis, *self.bases[1:]), values)

    def to_dense(self) -> Tensor:
        """The matrix on row-major vec(X)."""
        if self.thin:
            return self.completed().to_dense()
        order, values = len(self.bases), self.eigenvalues
        pairs = zip(self.bases, values.shape[-order:], strict=True)
        sides = [
            torch.eye(n, dtype=values.dtype, device=values.device) if basis is None else basis
            for basis, n in pairs
        ]
        basis = reduce(_kron, sides)
        return (basis * values.flatten(-order).unsqueeze(-2)) @ basis.mT


def is_thin(basis: Tensor | None) -> bool:
    """Whether a basis has fewer columns than dimensions."""
    return basis is not None and basis.size(-1) < basis.size(-2)


def with_outside(values: Tensor, totals: Tensor, basis: Tensor) -> Tensor:
    """Λ of a thin basis, the last row of which has what the trace lacks, evenly over the others.

    values: [B, r, i]; totals: Σ of a column over all o directions, [B, 1, i]; basis: [B, o, r]
    """
    real = (basis != 0).any(1).unsqueeze(2)  # [B, r, 1]; zero columns are outside too
    rank, inside = real.sum(1, keepdim=True).to(values), torch.where(real, values, 0.0)
    outside = (totals - inside.sum(1, keepdim=True)).clamp_min(0) / (basis.size(1) - rank)
    return torch.cat([torch.where(real, values, outside), outside], 1)


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
