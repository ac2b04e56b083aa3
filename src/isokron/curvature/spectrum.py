"""Eigendecompositions of a layer's operator: for EK-FAC, powers and what is told about a layer."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from isokron.linalg import eigh
from isokron.operators import Diagonal, Factor, Kron, KronEigen, LowRank

Operator = Kron | KronEigen
LARGE = 16384  # the most outputs for which a low-rank side is made dense, 1 GiB in float32


class Sides(NamedTuple):
    """Eigenvalues of the output side [B, o] and of the input side [B, i]."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenbases of both sides, Q_G and Q_A, None for I, and the eigenvalues on them [B, o, i].

    `sides`: those of each side, where values are their products.
    """

    bases: tuple[Tensor | None, Tensor | None]
    values: Tensor
    sides: Sides | None = None

    def least(self) -> float:
        return float(self.values.min())

    def condition(self) -> float:
        """Largest over smallest; inf where one is 0."""
        return float(self.values.max()) / self.least() if self.least() > 0 else float("inf")

    def logdet(self) -> float:
        return float(self.values.double().log().sum())

    def effective_rank(self) -> float:
        """exp(−Σ p log p), p the eigenvalues over their sum."""
        values = self.values.double().clamp_min(0)
        if not values.any():
            return 0.0
        shares = values / values.sum()
        return float((-torch.special.xlogy(shares, shares).sum()).exp())

    def damped(self, damping: float) -> "Spectrum":
        """Λ + λ. What is below zero before is rounding."""
        return replace(self, values=self.values.clamp_min(0) + damping, sides=None)

    def power(self, p: float) -> KronEigen:
        return KronEigen(self.bases, self.values**p)


def spectrum_of(operator: Operator, retries: Counter[str] | None = None) -> Spectrum:
    """The eigendecomposition of an operator. `retries`: see isokron.linalg.eigh."""
    if isinstance(operator, KronEigen):
        left_basis, right_basis = operator.bases
        return Spectrum((left_basis, right_basis), operator.eigenvalues)
    (left, left_basis), (right, right_basis) = (_eigen(f, retries) for f in operator.factors)
    values = left[:, :, None] * right[:, None, :]
    return Spectrum((left_basis, right_basis), values, Sides(left, right))


def has_spectrum(operator: Operator) -> bool:
    """Whether eigenvalues can be computed: not of a low-rank side with too many outputs."""
    output = operator.factors[0] if isinstance(operator, Kron) else None
    return not (isinstance(output, LowRank) and output.columns.size(-2) > LARGE)


def _eigen(factor: Factor, retries: Counter[str] | None) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues [B, n], and their vectors, None for I."""
    if isinstance(factor, Diagonal):
        return factor.values.clamp_min(0), None
    if isinstance(factor, LowRank) and factor.columns.size(-2) > LARGE:
        raise ValueError(
            f"eigenvalues of a low-rank side of {factor.columns.size(-2)} outputs, more than "
            f"{LARGE}, are not computed; use damped_inverse(damping), which does without"
        )
    values, basis = eigh(factor.to_dense(), retries)
    return values.clamp_min(0), basis  # below zero is rounding
