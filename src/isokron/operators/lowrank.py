"""LowRank: a diagonal plus or minus a product of tall matrices, never formed as one of n×n."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isokron.linalg.cholesky import factorize
from isokron.linalg.condition import lift
from isokron.linalg.eigen import eigh
from isokron.operators.factors import along, multiply
from isokron.operators.storage import gram, pieces, wide

EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class LowRank:
    """diag(d) ± U Uᵀ, positive. diagonal d: [..., n], or [..., 1] for d·I; columns U: [..., n, T]

    What is T×T is computed in float64, on the device of d; U may be in half precision and on the
    host. Powers and inverses have a U of at least float32, where U was.
    """

    diagonal: Tensor
    columns: Tensor
    sign: int = 1
    orthogonal: bool = False  # UᵀU is known to be diagonal

    def __post_init__(self) -> None:
        n, batch = self.columns.shape[-2], self.columns.shape[:-2]
        if self.diagonal.shape[:-1] != batch or self.diagonal.shape[-1] not in (1, n):
            raise ValueError(
                f"diagonal must be [..., n] or [..., 1] for columns [..., n, T], got shapes "
                f"{tuple(self.diagonal.shape)} and {tuple(self.columns.shape)}"
            )
        if self.sign not in (1, -1):
            raise ValueError(f"sign must be 1 or -1, got {self.sign!r}")

    def apply(self, x: Tensor, dim: int) -> Tensor:
        """d ⊙ x ± U (Uᵀ x), in the dtype of x: two thin products."""
        n = self.columns.size(-2)
        if x.shape[dim] != n:
            raise ValueError(f"LowRank acts on {n} rows, got {tuple(x.shape)} along dim {dim}")
        dtype = wide(torch.promote_types(x.dtype, self.columns.dtype))
        given, inner = x.to(dtype), None
        for start, part in pieces(self.columns, x.device, dtype):
            seen = multiply(given.narrow(dim, start, part.size(-2)), part.mT, dim)
            inner = seen if inner is None else inner + seen
        y = given * along(self.diagonal.to(x.device, dtype), x, dim)
        if inner is not None:
            for start, part in pieces(self.columns, x.device, dtype):
                rows = y.narrow(dim, start, part.size(-2))
                rows.add_(multiply(inner, part, dim), alpha=self.sign)
        return y.to(x.dtype)

    def inverse(self, damping: float = 0.0) -> "LowRank":
        """(d + λ ± UUᵀ)⁻¹; by Woodbury's identity, D⁻¹ ∓ D⁻¹U S⁻¹ UᵀD⁻¹, where d is a vector.

        D = diag(d) + λ, S = I ± UᵀD⁻¹U. With the minus, the least eigenvalue of S is only known
        to be λ/(max d + λ) or more, which must be above rounding: undamped it is singular.
        """
        if self._is_scalar():
            return self.power(-1.0, damping)
        _check_damping(damping)
        damped = self.diagonal.double() + damping
        self._check_positive(damped, -1.0)
        if self.sign < 0:
            self._check_invertible(damping)
        weights = damped.reciprocal().unsqueeze(-1)  # [..., n, 1]
        product = gram(self.columns, damped.device, weights)
        small = factorize(self.sign * product, 1.0, name="I ± UᵀD⁻¹U")
        if set(small.rungs) - {"as given"}:
            raise ValueError(
                f"LowRank diag(d) + damping - UUᵀ must be positive, with damping {damping!r} it is "
                "not; take d and U from the same data, or give more damping"
            )
        upper = small.lower.mT

        def scaled(part: Tensor, start: int) -> Tensor:
            rows = weights[..., start : start + part.size(-2), :]
            return torch.linalg.solve_triangular(upper, part * rows, upper=True, left=False)

        return LowRank(damped.reciprocal(), self._mapped(scaled, upper.size(-1)), -self.sign)

    def power(self, p: float, damping: float = 0.0) -> "LowRank":
        """(d + λ)ᵖ I ± Q |w| Qᵀ, w = (d + λ ± s)ᵖ − (d + λ)ᵖ, from UᵀU = B s Bᵀ, Q = U B s^(−½).

        Where d is a vector there is no such form: only p = 1 and p = −1.
        """
        _check_damping(damping)
        if p == 1:
            return replace(self, diagonal=self.diagonal + damping)
        if not self._is_scalar():
            if p == -1:
                return self.inverse(damping)
            raise ValueError(
                f"LowRank with a diagonal of {self.diagonal.size(-1)} values has powers 1 and -1, "
                f"got {p!r}; densify it: Dense(factor.to_dense()).power({p!r}, damping)"
            )
        base = self.diagonal.double().clamp(min=0) + damping
        if p < 0:
            self._check_positive(base, p)
        squares, basis = self._spectrum()
        change = self.sign * squares
        known = max(self.columns.size(-1) * EPS, torch.finfo(self.columns.dtype).eps)
        if p < 0 and (base + change <= known * base).any():
            raise ValueError(
                f"LowRank is singular: diagonal + damping {base.min().item():.3g} must be above "
                f"the eigenvalues of UUᵀ, at most {squares.max().item():.3g}; give more damping"
            )
        sign = self.sign if p > 0 else -self.sign
        return self._spectral(sign, base**p, _increment(base, change, p), squares, basis)

    def eigenpairs(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues s [..., r] of UUᵀ that are not zero, and their vectors Q [..., n, r]."""
        squares, basis = self._spectrum()
        return squares, self._turned(squares, basis, torch.ones_like(squares))

    def clip(self, max_condition: float) -> tuple["LowRank", Tensor]:
        """Eigenvalues, also the n − T equal ones, lifted to λmax/κ; and how many of n were: [...]

        `lift` does the same to the values of an Eigen factor.
        """
        if not self._is_scalar():
            raise ValueError(
                f"LowRank with a diagonal of {self.diagonal.size(-1)} values has no eigenvalues at "
                "hand to clip; densify it: Dense(factor.to_dense())"
            )
        base = self.diagonal.double().clamp(min=0)
        squares, basis = self._spectrum()
        others = self.columns.size(-2) - squares.size(-1)
        values, rest, lifted = lift(base + self.sign * squares, max_condition, base, others)
        return self._spectral(self.sign, rest, values - rest, squares, basis), lifted

    def to_dense(self, n: int | None = None) -> Tensor:
        dtype, device = wide(self.columns.dtype), self.diagonal.device
        columns = self.columns.to(device, dtype)
        diagonal = self.diagonal.to(dtype).expand(columns.shape[:-1])
        return torch.diag_embed(diagonal) + self.sign * (columns @ columns.mT)

    def _is_scalar(self) -> bool:
        return self.diagonal.size(-1) == 1

    def _spectrum(self) -> tuple[Tensor, Tensor | None]:
        """s [..., k] and B [..., T, k] of UᵀU = B s Bᵀ; B is None for I. Rounding in s is zero."""
        n, terms = self.columns.shape[-2:]
        if self.orthogonal:
            parts = pieces(self.columns, self.diagonal.device, torch.float64)
            return sum((part.square().sum(-2) for _, part in parts), torch.zeros(())), None
        squares, basis = eigh(gram(self.columns, self.diagonal.device))
        if squares.isnan().any():
            raise LinAlgError(f"LowRank: no eigenvalues found for UᵀU of {terms} columns")
        squares, basis = squares[..., -n:], basis[..., -n:]  # ascending: the others are zero
        if squares.numel():
            noise = terms * EPS * squares.amax(-1, keepdim=True)
            squares = torch.where(squares > noise, squares, 0.0)
            some = (squares > 0).flatten(0, -2).any(0) if squares.ndim > 1 else squares > 0
            squares, basis = squares[..., some], basis[..., some]
        return squares, basis

    def _spectral(
        self, sign: int, base: Tensor, change: Tensor, squares: Tensor, basis: Tensor | None
    ) -> "LowRank":
        """base·I ± Q |change| Qᵀ, Q = U B s^(−½)."""
        columns = self._turned(squares, basis, change.abs())
        return LowRank(base, columns, sign, orthogonal=True)

    def _turned(self, squares: Tensor, basis: Tensor | None, weights: Tensor) -> Tensor:
        """U B (w/s)^½: eigenvectors, each of squared length w."""
        scale = torch.where(squares > 0, (weights / squares).sqrt(), 0.0).unsqueeze(-2)
        mix = None if basis is None else basis * scale
        return self._mapped(
            lambda part, _: part * scale if mix is None else part @ mix, squares.size(-1)
        )

    def _mapped(self, function: Callable[[Tensor, int], Tensor], width: int) -> Tensor:
        """New columns from rows of U in float64 and the first row's number, kept where U is."""
        old = self.columns
        new = torch.empty(
            (*old.shape[:-1], width),
            dtype=wide(old.dtype),
            device=old.device,
            pin_memory=old.is_pinned(),
        )
        for start, part in pieces(old, self.diagonal.device, torch.float64):
            new[..., start : start + part.size(-2), :] = function(part, start).to(new)
        return new

    def _check_positive(self, damped: Tensor, p: float) -> None:
        if not (damped > 0).all():
            raise ValueError(
                f"LowRank is singular: diagonal + damping must be positive for power {p:g}, got "
                f"{damped.min().item():g}; give damping"
            )

    def _check_invertible(self, damping: float) -> None:
        """λ/(max d + λ) > T·eps: what diag(d) − UUᵀ is known to, which is the precision of d."""
        eps = torch.finfo(self.diagonal.dtype).eps
        least = self.columns.size(-1) * eps
        peak = self.diagonal.max().item()
        if not damping > least * (peak + damping):
            raise ValueError(
                f"LowRank diag(d) - UUᵀ is singular to rounding: damping/(max d + damping) must be "
                f"above T·eps = {least:.3g}, got damping {damping!r} with max d {peak:.3g}; "
                f"give damping of at least {2 * least * peak:.3g}"
            )


def _increment(base: Tensor, change: Tensor, p: float) -> Tensor:
    """(b + c)ᵖ − bᵖ, b ≥ 0, b + c ≥ 0 but for rounding; it does not cancel where c is small."""
    near = base**p * torch.expm1(p * torch.log1p(change / base))
    far = (base + change).clamp(min=0) ** p - base**p
    return torch.where(change.abs() < base, near, far)


def _check_damping(damping: float) -> None:
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
