"""A diagonal plus or minus UUᵀ with a tall matrix U; the n×n matrix is never formed.

On the output side of K-FAC, keeping T gradients U instead of an o×o covariance reduces the inverse
to T×T matrices (Woodbury). U may be stored in half precision and in host memory: it is read in
pieces of rows, converted to the dtype of the computation.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from isokron.linalg import along, eigh, factorize, multiply

POLICIES = ("all", "hybrid", "auto", "dense")
STORAGES = ("auto", "device", "host")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# A float32 covariance of this many outputs takes 1 GiB.
LARGE = 16384
# storage="auto" keeps larger matrices in host memory.
HOST_BYTES = 500_000_000
# Large enough to compute at full speed, and small compared with U.
PIECE_BYTES = 64_000_000
# Singular values of U below this, in units of its precision and of the largest, are rounding.
NOISE = 8.0
# Largest relative rounding error of stored columns: bfloat16 loses 0.2 %, so more is underflow.
ROUNDING_LOSS = 0.01
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class LowRank:
    """diag(d) ± UUᵀ, positive. diagonal d: [..., n], or [..., 1] for d·I; columns U: [..., n, T]

    T×T matrices are computed in float64 on the device of d. The inverse has a U in at least float32
    that is stored on the device of this U.
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
        """d ⊙ x ± U (Uᵀ x), in the dtype of x."""
        wide_x = x.to(wide(torch.promote_types(x.dtype, self.columns.dtype)))
        y = wide_x * along(self.diagonal.to(x.device, wide_x.dtype), x, dim)
        add_product_(y, self.columns, inner_product(self.columns, wide_x, dim), dim, self.sign)
        return y.to(x.dtype)

    def eigen(self) -> tuple[Tensor, Tensor]:
        """UUᵀ = Q diag(s) Qᵀ by UᵀU, Q stored where U is. [..., r], [..., n, r], r = min(n, T)"""
        squares, mix = thin_mix(
            *eigh(gram(self.columns, self.diagonal.device)),
            min(self.columns.shape[-2:]),
            torch.finfo(wide(self.columns.dtype)).eps,
        )
        return squares, self._map_rows(lambda piece, _: piece @ mix, squares.size(-1))

    def inverse(self, damping: float = 0.0) -> "LowRank":
        """(D ± UUᵀ)⁻¹ = D⁻¹ ∓ D⁻¹U S⁻¹ UᵀD⁻¹ with D = diag(d) + λ, S = I ± UᵀD⁻¹U (Woodbury).

        If d is a single number, by the eigenvalues of UᵀU instead.
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

        def scaled(piece: Tensor, start: int) -> Tensor:
            rows = weights[..., start : start + piece.size(-2), :]
            return torch.linalg.solve_triangular(upper, piece * rows, upper=True, left=False)

        return LowRank(damped.reciprocal(), self._map_rows(scaled, upper.size(-1)), -self.sign)

    def _inverse_by_eigenvalues(self, damping: float) -> "LowRank":
        """I/b ∓ U B diag(1/(b(b ± s))) BᵀUᵀ with b = d + λ, from UᵀU = B diag(s) Bᵀ."""
        base = self.diagonal.double().clamp(min=0) + damping
        _check_positive(base)
        squares, basis = eigh(gram(self.columns, base.device))
        outputs = self.columns.size(-2)
        # ascending, and at most n of them are not zero
        squares, basis = squares[..., -outputs:].clamp(min=0), basis[..., -outputs:]
        changed = base + self.sign * squares
        rounding = max(self.columns.size(-1) * EPS, torch.finfo(self.columns.dtype).eps)
        if not (changed > rounding * base).all():
            raise ValueError(
                f"LowRank is singular: diagonal + damping {base.min().item():.3g} must be above "
                f"the eigenvalues of UUᵀ, at most {squares.max().item():.3g}; give more damping"
            )
        mix = basis * (base * changed).rsqrt().unsqueeze(-2)
        columns = self._map_rows(lambda piece, _: piece @ mix, squares.size(-1))
        return LowRank(base.reciprocal(), columns, -self.sign)

    def to_dense(self, n: int | None = None) -> Tensor:
        columns = self.columns.to(self.diagonal.device, wide(self.columns.dtype))
        diagonal = self.diagonal.to(columns.dtype).expand(columns.shape[:-1])
        return torch.diag_embed(diagonal) + self.sign * (columns @ columns.mT)

    def _map_rows(self, function: Callable[[Tensor, int], Tensor], width: int) -> Tensor:
        """New columns: function(rows of U in float64, index of the first), stored where U is."""
        old = self.columns
        new = torch.empty(
            (*old.shape[:-1], width),
            dtype=wide(old.dtype),
            device=old.device,
            pin_memory=old.is_pinned(),
        )
        for start, piece in pieces(old, self.diagonal.device, torch.float64):
            new[..., start : start + piece.size(-2), :] = function(piece, start).to(new)
        return new

    def _check_invertible(self, damping: float) -> None:
        """Check λ/(max d + λ) > T·eps: the least eigenvalue of S against the precision of d."""
        least = self.columns.size(-1) * torch.finfo(self.diagonal.dtype).eps
        peak = self.diagonal.max().item()
        if not damping > least * (peak + damping):
            raise ValueError(
                f"LowRank diag(d) - UUᵀ is singular to rounding: damping/(max d + damping) must be "
                f"above T·eps = {least:.3g}, got damping {damping!r} with max d {peak:.3g}; "
                f"give damping of at least {2 * least * peak:.3g}"
            )


def _check_positive(damped: Tensor) -> None:
    if not (damped > 0).all():
        raise ValueError(
            "LowRank is singular: diagonal + damping must be positive, got "
            f"{damped.min().item():g}; give damping"
        )


def centered_factor(columns: Tensor, device: torch.device | None = None) -> LowRank:
    """diag(UUᵀ1) − UUᵀ for U ≥ 0: positive semidefinite, zero on constants. columns U: [..., o, T]

    With U = P/√T for probabilities P of T predictions, this is the exact Fisher of a softmax,
    diag(p̄) − PPᵀ/T. It stays positive if U was rounded to half precision, because the diagonal is
    computed from the stored U: the quadratic form is Σᵢⱼ (UUᵀ)ᵢⱼ (xᵢ − xⱼ)²/2.
    """
    device = columns.device if device is None else device
    total = columns.sum(-2, dtype=torch.float64).to(device).unsqueeze(-1)
    parts = [piece @ total for _, piece in pieces(columns, device, torch.float64)]
    return LowRank(torch.cat(parts, -2).squeeze(-1), columns, -1)


def woodbury_policy(
    outputs: int,
    terms: int | None,
    policy: str = "auto",
    *,
    rho: float = 0.75,
    t_max: int = 8192,
    o_max: int = LARGE,
) -> bool:
    """Whether to keep T gradients of a layer's outputs instead of their o×o covariance.

    Args:
        outputs: o.
        terms: T; None where it is not known, so that "auto" decides as "hybrid".
        policy: "all", "dense", "hybrid" (o > o_max), or "auto" (T ≤ ρ·o and T ≤ t_max).
        rho: ratio below which Woodbury is cheaper than Cholesky.
        t_max: largest T whose T×T matrix fits.
        o_max: largest o whose o×o matrix fits; 16,384 are 1 GiB in float32.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}")
    for name, value in (("rho", rho), ("t_max", t_max), ("o_max", o_max)):
        if not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"{name} must be positive, got {value!r}")
    if policy == "auto" and terms is not None:
        return terms <= rho * outputs and terms <= t_max
    return policy == "all" or (policy in ("auto", "hybrid") and outputs > o_max)


def storage_device(nbytes: int, device: torch.device | str, storage: str = "auto") -> torch.device:
    """The device itself, or the CPU for storage="host"; "auto": the device up to 500 MB."""
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {STORAGES}, got {storage!r}")
    to_host = storage == "host" or (storage == "auto" and nbytes > HOST_BYTES)
    return torch.device("cpu" if to_host else device)


def store(matrix: Tensor, dtype: torch.dtype | None = None, storage: str = "auto") -> Tensor:
    """The matrix in `dtype` on its `storage_device`, in pinned memory if it came from CUDA.

    Raises ValueError for entries that are not finite or outside the range of `dtype`.
    """
    dtype = matrix.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"store_dtype must be one of {DTYPES}, got {dtype}")
    if matrix.is_meta:  # a plan from shapes has no entries to check or to move
        return matrix.to(dtype)
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    if not norm.isfinite():
        raise ValueError(f"columns must be finite, their norm is {norm.item()}")
    rounded = matrix.to(dtype)
    if dtype is not matrix.dtype:
        lost = torch.linalg.vector_norm(rounded.to(matrix.dtype) - matrix, dtype=torch.float64)
        if not lost <= ROUNDING_LOSS * norm:
            raise ValueError(
                f"store_dtype {dtype} cannot represent columns with largest entry "
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
    """Pieces of rows on `device` in `dtype`, with the index of their first row. [..., n, T]

    A matrix that already has this device and dtype is one piece, without a copy.
    """
    rows = n = matrix.size(-2)
    if matrix.device != device or matrix.dtype != dtype:
        rows = PIECE_BYTES * n // max(1, matrix.numel() * dtype.itemsize)
    pinned = matrix.is_pinned()  # an asynchronous copy is safe only from pinned memory
    for start in range(0, n, max(1, rows)):
        piece = matrix[..., start : start + max(1, rows), :]
        yield start, piece.to(device=device, dtype=dtype, non_blocking=pinned)


def inner_product(columns: Tensor, x: Tensor, dim: int) -> Tensor:
    """Uᵀ along a dimension of x, in the dtype of x. U: [B..., n, T], x: [B..., .., n, ..]"""
    parts = (
        multiply(x.narrow(dim, start, piece.size(-2)), piece.mT, dim)
        for start, piece in pieces(columns, x.device, x.dtype)
    )
    return reduce(Tensor.add_, parts, next(parts))


def add_product_(y: Tensor, columns: Tensor, inner: Tensor, dim: int, alpha: float) -> None:
    """y ← y + αU inner along a dimension."""
    for start, piece in pieces(columns, y.device, y.dtype):
        rows = y.narrow(dim, start, piece.size(-2))
        rows.add_(multiply(inner, piece, dim), alpha=alpha)


def thin_mix(squares: Tensor, basis: Tensor, most: int, eps: float) -> tuple[Tensor, Tensor]:
    """The `most` largest s and B s^(−½) of UᵀU = B s Bᵀ, so that UUᵀ = Q s Qᵀ with Q = U B s^(−½).

    Both are 0 where s is rounding of a U of precision `eps`. squares: [..., T], basis: [..., T, T]
    """
    squares, basis = squares[..., -most:], basis[..., -most:]
    noise = (NOISE * eps) ** 2 + 16 * EPS
    real = squares > noise * squares.amax(-1, keepdim=True)
    scale = torch.where(real, squares.clamp_min(torch.finfo(squares.dtype).tiny).rsqrt(), 0.0)
    return torch.where(real, squares, 0.0), basis * scale.unsqueeze(-2)


def gram(columns: Tensor, device: torch.device, weights: Tensor | None = None) -> Tensor:
    """UᵀU, or Uᵀ diag(weights) U, in float64. U: [..., n, T], weights: [..., n, 1]"""
    shape = (*columns.shape[:-2], columns.size(-1), columns.size(-1))
    total = torch.zeros(shape, dtype=torch.float64, device=device)
    for start, piece in pieces(columns, device, torch.float64):
        rows = slice(start, start + piece.size(-2))
        total += piece.mT @ (piece if weights is None else piece * weights[..., rows, :])
    if not total.isfinite().all():
        raise ValueError("columns must be finite, UᵀU is not; look for overflow in the gradients")
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation: at least float32."""
    return torch.promote_types(dtype, torch.float32)
