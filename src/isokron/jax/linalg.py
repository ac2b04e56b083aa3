"""Matrix functions on batches: eigenbases, inverse roots, polar factors, norms, products.

The twins of isokron.linalg, where the reasons for the constants are.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from isokron.polynomials import Choice, schedule
from isokron.white_kron import POWER_STEPS

SMALLEST_DAMPING = 1e-30
MAX_STEPS = 100
BASIN = 0.1
TOLERANCE = 1e-3


def across(values: jax.Array, x: jax.Array) -> jax.Array:
    """Shape one value a block, [B], to broadcast over x, [B, ...]."""
    return jnp.expand_dims(values, tuple(range(values.ndim, x.ndim)))


def along(values: jax.Array, x: jax.Array, side: int) -> jax.Array:
    """Shape values [B, d] to broadcast over one side of x, [B, d₁, …]."""
    others = [axis for axis in range(1, x.ndim) if axis != side + 1]
    return jnp.expand_dims(values, others)


def nonzero(values: jax.Array) -> jax.Array:
    """Replace zeros by ones, to divide by."""
    return jnp.where(values == 0, 1, values)


def eyes(rows: int, size: int, dtype: Any) -> jax.Array:
    """`rows` identity matrices. [B, size, size]"""
    return jnp.tile(jnp.eye(size, dtype=dtype), (rows, 1, 1))


def multiply(x: jax.Array, matrix: jax.Array, side: int) -> jax.Array:
    """x ×_i A: y[b, .., i, ..] = Σ_j A[b, i, j] x[b, .., j, ..]. [B, d₁, …], [B, d, d]"""
    turned = jnp.einsum("bij,bj...->bi...", matrix, jnp.moveaxis(x, side + 1, 1))
    return jnp.moveaxis(turned, 1, side + 1)


def norms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """max|x| and ‖x‖/max|x| of every block. [B, ...] → [B], [B]"""
    # two numbers, because the squares of large entries overflow and those of tiny ones vanish
    axes = tuple(range(1, x.ndim))
    peak = jnp.max(jnp.abs(x), axis=axes)
    return peak, jnp.sqrt(jnp.sum(jnp.square(x / across(nonzero(peak), x)), axis=axes))


def power_of_two(peak: jax.Array) -> jax.Array:
    """The power of two with peak/power in [1, 2): dividing by it rounds nothing. 0 gives tiny."""
    peak = jnp.maximum(peak, jnp.finfo(peak.dtype).tiny)
    return peak / (2 * jnp.frexp(peak)[0])


def eigh(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A = Q diag(λ) Qᵀ, λ ascending. A: [..., n, n], of which only the lower triangle is read.

    Half precision is computed and returned in float32. NaN where A is not finite.
    """
    lower = jnp.tril(matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32)))
    peak = jnp.max(jnp.abs(lower), axis=(-2, -1), keepdims=True)
    finite = jnp.isfinite(peak)
    scale = power_of_two(jnp.where(finite, peak, 1))
    # some backends never return from a matrix that is not finite
    clean = jnp.where(finite, lower / scale, 0)
    vectors, values = jax.lax.linalg.eigh(clean, lower=True, symmetrize_input=False)
    values = jnp.where(finite[..., 0], values * scale[..., 0], jnp.nan)
    return values, jnp.where(finite, vectors, jnp.nan)


def follow(matrix: jax.Array, basis: jax.Array) -> jax.Array:
    """One orthogonal iteration, Q ← QR(AQ), columns by descending Rayleigh quotient. [..., n, n]"""
    # in descending order every column is freed of the larger ones and the iteration converges to
    # the eigenvectors; in ascending order it does not (SOAP: 2409.11321)
    peak = jnp.max(jnp.diagonal(matrix, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    positive = peak > 0  # a matrix of zeros has no preferred eigenvectors
    image = matrix @ basis / jnp.where(positive, peak, 1)
    quotients = jnp.sum(basis * image, axis=-2, keepdims=True)
    order = jnp.argsort(quotients, axis=-1, descending=True, stable=True)
    turned = _orthogonal(jnp.take_along_axis(image, order, axis=-1))
    return jnp.where(positive, turned, basis)


def _orthogonal(matrix: jax.Array) -> jax.Array:
    """Q of A = QR. [..., n, n]"""

    def one_by_one(matrix: jax.Array) -> jax.Array:
        return jax.lax.map(batched, matrix.reshape(-1, *matrix.shape[-2:])).reshape(matrix.shape)

    def batched(matrix: jax.Array) -> jax.Array:
        return jnp.linalg.qr(matrix)[0]

    # jaxlib (0.10.2) divides a batch among the threads of XLA's pool and blocks a thread until all
    # are done: as many batches at a time as there are threads wait for each other for ever
    return jax.lax.platform_dependent(matrix, cpu=one_by_one, default=batched)


def offdiagonal(matrix: jax.Array, basis: jax.Array) -> jax.Array:
    """‖QᵀAQ without its diagonal‖ / ‖A‖: how far a basis is from diagonalizing A. [...]"""
    peak = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    turned = basis.mT @ (matrix / jnp.where(peak > 0, peak, 1)) @ basis
    outside = jnp.where(jnp.eye(basis.shape[-1], dtype=bool), 0, turned)
    total = jnp.linalg.norm(turned, axis=(-2, -1))
    tiny = jnp.finfo(turned.dtype).tiny
    return jnp.linalg.norm(outside, axis=(-2, -1)) / jnp.maximum(total, tiny)


def inverse_root(
    matrix: jax.Array, root: float, damping: Any, solver: str = "eigh", deficient: str = "lift"
) -> jax.Array:
    """(A + εI)^(−1/p), p = `root`, ε = `damping`. A: [..., n, n]; NaN where there is none.

    "eigh" treats eigenvalues as `inverse_power` does. "newton" and "higher" use matrix products
    only, for accelerators: they need an integer p and A + εI positive definite.
    """
    if solver != "eigh":
        diagonal = jnp.diagonal(matrix, axis1=-2, axis2=-1)
        added = damping if deficient == "lift" else _relative(diagonal, damping)[..., None]
        return _coupled_iteration(matrix, int(root), added, order=2 if solver == "newton" else 3)
    values, basis = eigh(matrix)
    powers = inverse_power(values, root, damping, deficient)
    return (basis * powers[..., None, :]) @ basis.mT


def inverse_power(
    values: jax.Array, root: float, damping: Any, deficient: str = "lift"
) -> jax.Array:
    """λ^(−1/p) of eigenvalues that rounding may have pushed below zero. [..., n]

    "lift":     (λ − min(λmin, 0) + ε)^(−1/p): a shift takes the least eigenvalue to at least ε.
    "relative": as "lift", with ε in units of the mean eigenvalue.
    "pseudo":   λ^(−1/p), and 0 where λ ≤ n·eps·λmax.
    """
    if deficient != "pseudo":
        lowest = jnp.minimum(jnp.min(values, axis=-1, keepdims=True), 0)
        added = damping if deficient == "lift" else _relative(values, damping)
        return (values - lowest + added) ** (-1 / root)
    rtol = values.shape[-1] * float(jnp.finfo(values.dtype).eps)
    threshold = jnp.maximum(rtol * jnp.max(values, axis=-1, keepdims=True), 0)
    return jnp.where(values <= threshold, 0, values ** (-1 / root))  # NaN stays NaN


def _relative(values: jax.Array, damping: Any) -> jax.Array:
    """ε times the mean eigenvalue, which is the mean of the diagonal. [..., n] → [..., 1]"""
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    least = jnp.where(damping > 0, SMALLEST_DAMPING, 0)
    return jnp.maximum(damping * jnp.mean(wide, axis=-1, keepdims=True), least)


def _coupled_iteration(matrix: jax.Array, root: int, damping: Any, order: int) -> jax.Array:
    """X ← X q(E), M ← q(E)ᵖ M, E = I − M, from X = z^(1/p) I, M = zA: M → I and X → A^(−1/p).

    q is the Taylor polynomial of (1 − E)^(−1/p) with `order` terms; two terms are Newton's method.
    N. Higham, Functions of Matrices, ch. 7.
    """
    lower = jnp.tril(matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32)))
    eye = jnp.eye(lower.shape[-1], dtype=lower.dtype)
    full = lower + jnp.tril(lower, -1).mT + damping * eye
    scale = power_of_two(jnp.max(jnp.abs(full), axis=(-2, -1), keepdims=True))
    full = full / scale
    bound = jnp.minimum(  # two upper bounds of the largest eigenvalue
        jnp.linalg.norm(full, axis=(-2, -1), keepdims=True),
        jnp.max(jnp.sum(jnp.abs(full), axis=-1, keepdims=True), axis=-2, keepdims=True),
    )

    curvature = (1 + 1 / root) / (2 * root)  # of the Taylor polynomial

    def distance(m: jax.Array) -> jax.Array:
        return jnp.linalg.norm(m - eye, axis=(-2, -1), keepdims=True)

    def step(state: Any) -> Any:
        count, x, m, error, active = state
        gap = eye - m
        factor = eye + (gap / root if order == 2 else (eye / root + curvature * gap) @ gap)
        next_x, next_m = x @ factor, jnp.linalg.matrix_power(factor, root) @ m
        next_error = distance(next_m)
        # outside the basin the error may stand still for long, while small eigenvalues grow
        going = next_error < jnp.where(error < BASIN, error / 2, error * 2)
        taken = active & (going | (next_error < error))
        x, m = jnp.where(taken, next_x, x), jnp.where(taken, next_m, m)
        return count + 1, x, m, jnp.where(taken, next_error, error), active & going

    first = full / bound
    error = distance(first)
    _, x, _, error, _ = jax.lax.while_loop(
        lambda state: (state[0] < MAX_STEPS) & jnp.any(state[-1]),
        step,
        (jnp.int32(0), eye * bound ** (-1 / root), first, error, error > 0),
    )
    x = (x + x.mT) / 2 * scale ** (-1 / root)
    return jnp.where(error <= TOLERANCE, x, jnp.nan)


def newton_schulz(
    matrix: jax.Array,
    steps: int = 5,
    coefficients: Choice | None = None,
    dtype: Any = None,
    eps: float = 1e-7,
) -> jax.Array:
    """The polar factor U Vᵀ of U S Vᵀ: X ← aX + (bA + cA²)X, A = XXᵀ, from matrix/‖matrix‖.

    No gradient flows through.

    Args:
        matrix: [..., m, n].
        steps: number of iterations.
        coefficients: a name in isokron.polynomials.POLYNOMIALS, one triple (a, b, c) for all
            steps, or one triple a step; None is "classic".
        dtype: of the iteration; by default bfloat16 on accelerators, at least float32 on CPU.
        eps: smallest norm to divide by.
    """
    matrix = jax.lax.stop_gradient(jnp.asarray(matrix))
    if matrix.ndim < 2:
        raise ValueError(f"newton_schulz needs matrices [..., m, n], got shape {matrix.shape}")
    if not jnp.issubdtype(matrix.dtype, jnp.floating):
        raise ValueError(f"newton_schulz needs real floating-point matrices, got {matrix.dtype}")
    triples = schedule(coefficients, steps)
    if matrix.size == 0:
        return matrix
    wide = jnp.promote_types(matrix.dtype, jnp.float32)
    if dtype is None:
        dtype = wide if jax.default_backend() == "cpu" else jnp.bfloat16
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).astype(wide)  # A = XXᵀ is then on the short side
    # a power of two rounds nothing; without it the norm of a finite matrix may overflow
    x = (x / power_of_two(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))).astype(dtype)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), eps).astype(dtype)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).astype(matrix.dtype)


def spectral_direction(
    blocks: jax.Array,
    scale: str | None = "match_rms_adamw",
    steps: int = 5,
    coefficients: Choice | None = "classic",
    dtype: Any = None,
) -> jax.Array:
    """scale · polar(M). [B, m, ...], with all dimensions after m as columns

    "match_rms_adamw" is 0.2√max(m, n), at which an update's RMS is about AdamW's; "original" is
    √max(1, m/n), None is 1.
    """
    matrices = blocks.reshape(*blocks.shape[:2], -1)
    rows, cols = matrices.shape[1:]
    polar = newton_schulz(matrices, steps, coefficients, dtype)
    if scale == "original":
        polar *= math.sqrt(max(1, rows / cols))
    elif scale is not None:
        polar *= 0.2 * math.sqrt(max(rows, cols))
    return polar.reshape(blocks.shape)


def norm_bound(
    matrix: jax.Array, scale: jax.Array, probes: jax.Array, size: jax.Array
) -> jax.Array:
    """‖A‖₂ from below, for symmetric or skew A. [B, n, n], [B], [k, n], [B] → [B]

    V₀ = a + rms(a)·probes with a the row of A of largest energy; V ← VA/‖VA‖ row by row, six
    times; then max ‖VA‖. A = 0 has bound 0. `scale`: near the largest entries, so that squares of
    A/scale neither overflow nor vanish. `probes`: of mean square 1. `size`: rows but for padding.
    """
    tiny = jnp.finfo(matrix.dtype).tiny
    # dividing the few probes costs less than dividing the matrix
    inverse = (1 / jnp.maximum(scale, tiny))[:, None, None]
    energy = jnp.sum(jnp.square(matrix * inverse), axis=2)  # [B, n]
    chosen = jnp.argmax(energy, axis=1)[:, None] == jnp.arange(matrix.shape[1])  # [B, n]
    row = jnp.einsum("bi,bij->bj", chosen.astype(matrix.dtype), matrix)[:, None, :] * inverse
    mean_square = jnp.sum(jnp.square(row), axis=2, keepdims=True) / across(size, row)
    vectors = row + jnp.sqrt(mean_square) * probes

    def power(_: int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        image = jnp.einsum("bki,bij->bkj", carry[0], matrix) * inverse
        lengths = jnp.sqrt(jnp.sum(jnp.square(image), axis=2, keepdims=True))
        return image / jnp.maximum(lengths, tiny), lengths

    # a loop, because unrolled steps would take most of the compile time
    zero = jnp.zeros_like(vectors[:, :, :1])
    _, lengths = jax.lax.fori_loop(0, POWER_STEPS + 1, power, (vectors, zero))
    return jnp.max(lengths[:, :, 0], axis=1) * scale
