"""Eigenvalues of a layer's operator: clipped, damped, raised to powers, and told about."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isokron.curvature.layer import Operator
from isokron.linalg import eigh, lift
from isokron.operators import Dense, Diagonal, Factor, Kron, KronEigen, KronThin, LowRank

TINY = 1e-300
LARGE = 16384  # the most outputs of a softmax whose Fisher is made dense, then of 1 GiB in float32


@dataclass(frozen=True, eq=False)
class Sides:
    """Eigenvalues of the output side and of the input side: [B, r], [B, i]; `rest`: [B, 1], of what
    lies outside the span of a thin basis of outputs."""

    left: Tensor
    right: Tensor
    rest: Tensor


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenbases of both sides, Q_G [B, o, r] and Q_A, None for I, and the eigenvalues on them.

    values: [B, r, i]; rest: [B, 1, i], of the `others` = o − r directions outside the span of Q_G.
    `sides`: theirs, where values are products.
    """

    bases: tuple[Tensor | None, Tensor | None]
    values: Tensor
    rest: Tensor
    others: int = 0
    sides: Sides | None = None

    def all(self) -> tuple[tuple[Tensor, int], ...]:
        """Eigenvalues, and how often each is there."""
        return ((self.values, 1), (self.rest, self.others)) if self.others else ((self.values, 1),)

    def trace(self) -> float:
        return sum(float(values.double().sum()) * times for values, times in self.all())

    def mean(self) -> float:
        blocks, some, inputs = self.values.shape
        return self.trace() / (blocks * (some + self.others) * inputs)

    def least(self) -> float:
        return min(float(values.min()) for values, _ in self.all() if values.numel())

    def condition(self) -> float:
        """Largest over smallest; inf where one is 0."""
        most = max(float(values.max()) for values, _ in self.all() if values.numel())
        return most / self.least() if self.least() > 0 else float("inf")

    def logdet(self) -> float:
        return sum(float(values.double().log().sum()) * times for values, times in self.all())

    def effective_rank(self) -> float:
        """exp(−Σ p log p), p the eigenvalues over their sum."""
        total = self.trace()
        if total == 0:
            return 0.0
        shares = ((values.double().clamp_min(0) / total, times) for values, times in self.all())
        entropy = -sum(torch.special.xlogy(p, p).sum() * times for p, times in shares)
        return float(torch.as_tensor(entropy).exp())

    def power(self, p: float, pseudo: bool = False) -> KronEigen | KronThin:
        """`pseudo`: zeros, and what is no more than rounding beside the largest, become zero."""
        left, right = self.bases
        values, rest = self.values**p, self.rest**p
        if pseudo:
            least = self._rounding()
            values = torch.where(self.values > least, values, 0.0)
            rest = torch.where(self.rest > least, rest, 0.0)
        if not self.others:
            return KronEigen(self.bases, values)
        assert left is not None  # I is not thin
        return KronThin((left, right), values, rest)

    def _rounding(self) -> float:
        """What eigenvalues of a matrix of this size are known to."""
        sizes = sum(self.values.shape[1:]) + self.others
        most = max(float(values.max()) for values, _ in self.all() if values.numel())
        return sizes * torch.finfo(self.values.dtype).eps * most


def spectrum_of(operator: Operator, retries: Counter[str] | None = None) -> Spectrum:
    """The eigendecomposition of an operator. What is below zero in it is rounding.

    `retries`: see isokron.linalg.eigh.
    """
    if isinstance(operator, KronThin):
        thin, right = operator.bases
        others = thin.size(-2) - thin.size(-1)
        return Spectrum((thin, right), operator.eigenvalues, operator.rest, others)
    if isinstance(operator, KronEigen):
        left, right = operator.bases
        values = operator.eigenvalues
        return Spectrum((left, right), values, torch.zeros_like(values[:, :1]))
    (values, left, rest), (own, right, _) = (_eigen(factor, retries) for factor in operator.factors)
    others = 0 if left is None else left.size(-2) - left.size(-1)
    return _multiplied(Spectrum((left, right), values, rest, others), Sides(values, own, rest))


def damped(found: Spectrum, damping: float, split: str, most: float | None) -> tuple[Spectrum, int]:
    """Eigenvalues lifted to the largest over `most` and damped, and how many were lifted."""
    sides = found.sides
    if sides is None:
        values, rest, lifted = _lifted(found, most)
        return replace(found, values=values + damping, rest=rest + damping), lifted
    if most is None:
        left, right, rest, lifted = sides.left, sides.right, sides.rest, 0
    else:
        left, rest, some = lift(sides.left, most, sides.rest, found.others)
        right, _, more = lift(sides.right, most)
        lifted = int(some.sum() + more.sum())
    if split == "joint":
        whole = _multiplied(found, Sides(left, right, rest))
        return replace(whole, values=whole.values + damping, rest=whole.rest + damping), lifted
    mean = (left.sum(1) + found.others * rest[:, 0]) / (left.size(1) + found.others)
    to_left, to_right = sides_damping(mean, right.mean(1), damping)
    left, rest = left + to_left[:, None], rest + to_left[:, None]
    return _multiplied(found, Sides(left, right + to_right[:, None], rest)), lifted


def sides_damping(left: Tensor, right: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """√λ/π and π√λ, π² = mean eigenvalue of inputs over that of outputs. Means: [B]"""
    pi = (right / left.clamp_min(TINY)).sqrt().clamp_min(TINY)
    root = damping**0.5
    return root / pi, root * pi


def is_softmax(factor: Factor) -> bool:
    """diag(mean) − UUᵀ, of which no eigenvalue is known without all of it."""
    return isinstance(factor, LowRank) and factor.diagonal.size(-1) > 1


def within_reach(operator: Operator) -> bool:
    """Whether eigenvalues can be found: not of a softmax over too many classes."""
    if not isinstance(operator, Kron):
        return True
    output = operator.factors[0]
    return not (isinstance(output, LowRank) and is_softmax(output) and _classes(output) > LARGE)


def _classes(factor: LowRank) -> int:
    return factor.columns.size(-2)


def _multiplied(found: Spectrum, sides: Sides) -> Spectrum:
    values = sides.left[:, :, None] * sides.right[:, None, :]
    rest = sides.rest[:, :, None] * sides.right[:, None, :]
    return replace(found, values=values, rest=rest, sides=sides)


def _lifted(found: Spectrum, most: float | None) -> tuple[Tensor, Tensor, int]:
    values, rest = found.values.clamp_min(0), found.rest.clamp_min(0)
    if most is None:
        return values, rest, 0
    peaks = [each.amax((1, 2), keepdim=True) for each, _ in found.all() if each.numel()]
    floor = torch.stack(peaks).amax(0) / most
    lifted = sum(int((each < floor).sum()) * times for each, times in found.all())
    return values.maximum(floor), rest.maximum(floor), lifted


def _eigen(factor: Factor, retries: Counter[str] | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Eigenvalues [B, r], their vectors, None for I, and the eigenvalue of all else [B, 1]."""
    if isinstance(factor, Diagonal):
        values = factor.values.clamp_min(0)
        return values, None, torch.zeros_like(values[:, :1])
    if isinstance(factor, LowRank) and not is_softmax(factor):
        squares, thin = factor.eigenpairs()
        values = (factor.diagonal + factor.sign * squares).clamp_min(0)
        return values.to(thin.dtype), thin, factor.diagonal.to(thin.dtype)
    if isinstance(factor, LowRank) and _classes(factor) > LARGE:
        raise ValueError(
            f"eigenvalues of a softmax over {_classes(factor)} classes, more than {LARGE}, "
            "are not found; use inverse(damping, split='sides'), which does without"
        )
    assert isinstance(factor, Dense | LowRank)
    values, basis = eigh(factor.to_dense(), retries)
    values = values.clamp_min(0)
    return values, basis, torch.zeros_like(values[:, :1])
