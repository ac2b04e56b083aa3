"""A diagonal plus or minus a product of tall matrices U, never formed as one of n×n.

On the output side of K-FAC, T gradients U in place of a covariance o×o make its inverse cost
matrices of T×T (Woodbury). U may be in half precision and in the host's memory: it is read in
pieces, in the dtype of the computation.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isokron.linalg.cholesky import factorize
from isokron.linalg.eigen import eigh
from isokron.operators.factors import along, multiply

POLICIES = ("all", "hybrid", "auto", "none")
STORAGES = ("auto", "device", "host")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LARGE = 16384  # outputs whose covariance in float32 takes 1 GiB
HOST_BYTES = 500_000_000  # a larger matrix is kept in the host's memory by storage="auto"
PIECE_BYTES = 64_000_000  # enough to compute at full speed, and little beside the matrix
# The most of its norm a matrix may lose to rounding: bfloat16 takes 0.2 %, so more is underflow.
ROUNDING_LOSS = 0.01
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class LowRank:
    """diag(d) ± U Uᵀ, positive. diagonal d: [..., n], or [..., 1] for d·I; columns U: [..., n, T]

    What is T×T is computed in float64 on the device of d. The inverse has a U of at least float32,
    in the same memory.
    """

    diagonal: Tensor
    columns: Tensor
    sign: int = 1

    def __post_init__(self) -> None:
        n, batch = self.columns.shape[-2], self.columns.shape[:-2]
        if self.diagonal.shape[:-1] != batch or self.diagonal.shape[-1] not in (1, n):
            raise ValueError(
                f"diagonal must be [..., n] or [..., 1] for columns [..., n, T], got shapes "
                f"{tuple(self.diagonal.shape)} and {tuple(self.columns.shape)}"
            )

    def apply(self, x: Tensor, dim: int) -> Tensor:
        """d ⊙ x ± U (Uᵀ x), in the dtype of x: two thin products."""
        dtype = wide(torch.promote_types(x.dtype, self.columns.dtype))
        wide_x, inner = x.to(dtype), None
        for start, part in pieces(self.columns, x.device, dtype):
            product = multiply(wide_x.narrow(dim, start, part.size(-2)), part.mT, dim)
            inner = product if inner is None else inner + product
        y = wide_x * along(self.diagonal.to(x.device, dtype), x, dim)
        if inner is not None:
            for start, part in pieces(self.columns, x.device, dtype):
                rows = y.narrow(dim, start, part.size(-2))
                rows.add_(multiply(inner, part, dim), alpha=self.sign)
        return y.to(x.dtype)

    def inverse(self, damping: float = 0.0) -> "LowRank":
        """(d + λ ± UUᵀ)⁻¹ by Woodbury's identity, D⁻¹ ∓ D⁻¹U S⁻¹ UᵀD⁻¹, where d is a vector.

        D = diag(d) + λ, S = I ± UᵀD⁻¹U. With the minus, the least eigenvalue of S is only known
        to be λ/(max d + λ) or more, which must be above rounding: undamped it is singular.
        """
        if not 0 <= damping < math.inf:
            raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
        if self.diagonal.size(-1) == 1:
            return self._inverse_by_eigenvalues(damping)
        damped = self.diagonal.double() + damping
        _check_positive(damped)
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

    def _inverse_by_eigenvalues(self, damping: float) -> "LowRank":
        """I/b ∓ Q |w| Qᵀ, w = 1/(b ± s) − 1/b, b = d + λ, from UᵀU = B s Bᵀ, Q = U B s^(−½)."""
        base = self.diagonal.double().clamp(min=0) + damping
        _check_positive(base)
        squares, basis = self._spectrum()
        change = self.sign * squares
        rounding = max(self.columns.size(-1) * EPS, torch.finfo(self.columns.dtype).eps)
        if (base + change <= rounding * base).any():
            raise ValueError(
                f"LowRank is singular: diagonal + damping {base.min().item():.3g} must be above "
                f"the eigenvalues of UUᵀ, at most {squares.max().item():.3g}; give more damping"
            )
        weights = _increment(base, change).abs()
        scale = torch.where(squares > 0, (weights / squares).sqrt(), 0.0).unsqueeze(-2)
        mix = basis * scale
        columns = self._mapped(lambda part, _: part @ mix, squares.size(-1))
        return LowRank(base**-1.0, columns, -self.sign)

    def to_dense(self, n: int | None = None) -> Tensor:
        dtype, device = wide(self.columns.dtype), self.diagonal.device
        columns = self.columns.to(device, dtype)
        diagonal = self.diagonal.to(dtype).expand(columns.shape[:-1])
        return torch.diag_embed(diagonal) + self.sign * (columns @ columns.mT)

    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """s [..., k] and B [..., T, k] of UᵀU = B s Bᵀ. Rounding in s is zero."""
        n, terms = self.columns.shape[-2:]
        squares, basis = eigh(gram(self.columns, self.diagonal.device))
        if squares.isnan().any():
            raise LinAlgError(f"LowRank: no eigenvalues found for UᵀU of {terms} columns")
        squares, basis = squares[..., -n:], basis[..., -n:]  # ascending: the others are zero
        if squares.numel():
            noise = terms * EPS * squares.amax(-1, keepdim=True)
            squares = torch.where(squares > noise, squares, 0.0)
            nonzero = (squares > 0).flatten(0, -2).any(0) if squares.ndim > 1 else squares > 0
            squares, basis = squares[..., nonzero], basis[..., nonzero]
        return squares, basis

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


def _increment(base: Tensor, change: Tensor) -> Tensor:
    """1/(b + c) − 1/b, b > 0, b + c > 0; it does not cancel where c is small."""
    near = base**-1.0 * torch.expm1(-torch.log1p(change / base))
    far = (base + change).clamp(min=0) ** -1.0 - base**-1.0
    return torch.where(change.abs() < base, near, far)


def _check_positive(damped: Tensor) -> None:
    if not (damped > 0).all():
        raise ValueError(
            "LowRank is singular: diagonal + damping must be positive, got "
            f"{damped.min().item():g}; give damping"
        )


def centered_factor(columns: Tensor, device: torch.device | None = None) -> LowRank:
    """diag(UUᵀ1) − UUᵀ, U ≥ 0: positive, and zero on what is constant. columns U: [..., o, T]

    With U = P/√T, P the probabilities of T predictions, it is the exact Fisher of a softmax,
    diag(p̄) − PPᵀ/T. Since the diagonal is made of U as stored, it is positive also where half
    precision has rounded U: its quadratic form is Σᵢⱼ (UUᵀ)ᵢⱼ (xᵢ − xⱼ)²/2.
    """
    device = columns.device if device is None else device
    total = columns.sum(-2, dtype=torch.float64).to(device).unsqueeze(-1)
    parts = pieces(columns, device, torch.float64)
    mean = torch.cat([part @ total for _, part in parts], -2).squeeze(-1)
    return LowRank(mean, columns, -1)


def woodbury_policy(
    outputs: int, terms: int, policy: str = "auto", *, rho: float = 0.75, t_max: int = 8192
) -> bool:
    """Whether the output side of a layer is kept as its T gradients instead of o×o.

    "auto":   T ≤ ρ·o, where it is cheaper than Cholesky, and T ≤ t_max, whose T×T still fits.
    "hybrid": o > 16,384, of which a covariance in float32 takes more than 1 GiB.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}")
    for name, value in (("rho", rho), ("t_max", t_max)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")
    if policy == "auto":
        return terms <= rho * outputs and terms <= t_max
    return policy == "all" or (policy == "hybrid" and outputs > LARGE)


def storage_device(nbytes: int, device: torch.device | str, storage: str = "auto") -> torch.device:
    """The device itself or the host's memory; "auto": the device up to 500 MB."""
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {STORAGES}, got {storage!r}")
    if storage == "host" or (storage == "auto" and nbytes > HOST_BYTES):
        return torch.device("cpu")
    return torch.device(device)


def store(matrix: Tensor, dtype: torch.dtype | None = None, storage: str = "auto") -> Tensor:
    """The matrix in `dtype`, where `storage_device` says; pinned where it has left a CUDA device.

    What is not finite, or does not fit the range of `dtype`, is an error.
    """
    dtype = matrix.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"store_dtype must be one of {DTYPES}, got {dtype}")
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    if not norm.isfinite():
        raise ValueError(f"columns must be finite, their norm is {norm.item()}")
    rounded = matrix.to(dtype)
    if dtype is not matrix.dtype:
        lost = torch.linalg.vector_norm(rounded.to(matrix.dtype) - matrix, dtype=torch.float64)
        if not lost <= ROUNDING_LOSS * norm:
            raise ValueError(
                f"store_dtype {dtype} has not the range of columns with largest entry "
                f"{matrix.abs().max().item():.3g}; use bfloat16 or float32"
            )
    device = storage_device(rounded.nbytes, rounded.device, storage)
    if device == rounded.device:
        return rounded
    host = torch.empty(rounded.shape, dtype=dtype, device=device, pin_memory=rounded.is_cuda)
    return host.copy_(rounded)


def pieces(
    matrix: Tensor, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """First row and rows of each piece, on `device` and in `dtype`. [..., n, T] → [..., ≤ n, T]

    A matrix that is there already is one piece, and nothing is copied.
    """
    n = matrix.size(-2)
    rows = n
    if matrix.device != device or matrix.dtype != dtype:
        rows = PIECE_BYTES * n // max(1, matrix.numel() * dtype.itemsize)
    rows = max(1, rows)
    pinned = matrix.is_pinned()  # from other memory, and to it, a copy must have ended
    for start in range(0, n, rows):
        part = matrix[..., start : start + rows, :]
        yield start, part.to(device=device, dtype=dtype, non_blocking=pinned)


def gram(columns: Tensor, device: torch.device, weights: Tensor | None = None) -> Tensor:
    """UᵀU, or Uᵀ diag(weights) U, in float64. U: [..., n, T], weights: [..., n, 1]"""
    shape = (*columns.shape[:-2], columns.size(-1), columns.size(-1))
    total = torch.zeros(shape, dtype=torch.float64, device=device)
    for start, part in pieces(columns, device, torch.float64):
        rows = slice(start, start + part.size(-2))
        total += part.mT @ (part if weights is None else part * weights[..., rows, :])
    if not total.isfinite().all():
        raise ValueError("columns must be finite, UᵀU is not; look for overflow in the gradients")
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32, for computation."""
    return torch.promote_types(dtype, torch.float32)
