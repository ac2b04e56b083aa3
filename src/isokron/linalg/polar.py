"""The polar factor of a matrix: U Vᵀ where the matrix is U S Vᵀ."""

import math

import torch
from torch import Tensor

from isokron.kernels.verify import verified
from isokron.linalg.eigen import eigh, power_of_two
from isokron.linalg.gram import symmetric_product
from isokron.polynomials import Choice, Coefficients, schedule

METHODS = ("auto", "plain", "symmetric", "gram", "eigh", "reference")

# So many bytes of matrices are iterated on at a time: what the caches of a CPU hold, and enough to
# keep a device busy. It bounds the memory that the intermediate products of a large batch take.
CPU_CHUNK = 2**21
DEVICE_CHUNK = 2**28
# Rows from which half of a product has enough tiles for a large GPU; not measured on one.
GPU_SYMMETRIC = 1024


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    coefficients: Choice | None = None,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
    method: str = "auto",
) -> Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, from X₀ = matrix/‖matrix‖, `steps` times. [..., m, n]

    `coefficients`: a name in POLYNOMIALS, one triple for all steps, or one triple a step. None is
    "classic", or anything closer to the polar factor that is quicker to compute.
    `dtype`: of the iteration; by default bfloat16 on accelerators and at least float32 on CPU,
    where half-precision products are many times slower.
    `method`: how it is computed. "plain" is the formula; "symmetric" computes half of A and of A²;
    "gram" iterates on A alone and multiplies X once; "eigh" is the exact polar factor, whatever
    the steps; "auto" takes the one measured to be quickest (`quickest`). "reference" is the loop
    as Muon was published, to the bit, by default in bfloat16; "plain" in bfloat16 is that of
    torch.optim.Muon. No gradient flows through any of them.
    """
    if matrix.ndim < 2:
        raise ValueError(
            f"newton_schulz needs matrices [..., m, n], got shape {tuple(matrix.shape)}"
        )
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if not matrix.is_floating_point():
        raise ValueError(f"newton_schulz needs real floating-point matrices, got {matrix.dtype}")
    triples = schedule(coefficients, steps)
    matrix = matrix.detach()
    if matrix.numel() == 0:
        return matrix.clone()
    wide = torch.promote_types(matrix.dtype, torch.float32)
    if dtype is None:
        half = method == "reference" or matrix.device.type != "cpu"
        dtype = torch.bfloat16 if half else wide
    tall = matrix.size(-2) > matrix.size(-1)
    stack = matrix.mT if tall else matrix  # A = XXᵀ is then on the short side
    stack = stack.reshape(-1, *stack.shape[-2:])
    if method == "auto":
        exact = coefficients is None and steps == 5
        rows, cols = stack.shape[-2:]
        method = quickest(rows, cols, matrix.device, dtype, triples, exact)
    limit = CPU_CHUNK if matrix.device.type == "cpu" else DEVICE_CHUNK
    size = max(1, limit // (stack[0].numel() * stack.element_size()))
    if method == "eigh":
        size = max(size, torch.get_num_threads())  # matrices are decomposed one a core
    parts = [_polar(chunk, method, triples, wide, dtype, eps) for chunk in stack.split(size)]
    x = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(matrix.dtype)
    x = x.reshape(*matrix.shape[:-2], *x.shape[-2:])
    return x.mT if tall else x


def quickest(
    rows: int,
    cols: int,
    device: torch.device,
    dtype: torch.dtype,
    triples: list[Coefficients],
    exact: bool = False,
) -> str:
    """The method for matrices of rows ≤ cols, as benchmarks/kernels.py measured them.

    `exact`: whether the polar factor itself will do, rather than the polynomial of the triples.
    """
    # A's smallest eigenvalues are known to rounding only, which the square of the slope enlarges
    slope = math.prod([a for a, _, _ in triples])
    resolved = slope**2 * torch.finfo(dtype).eps < 1
    if device.type != "cpu":
        return "symmetric" if rows >= GPU_SYMMETRIC and _by_triton(device, dtype) else "plain"
    long = cols >= 2 * rows
    if exact and dtype.itemsize >= 4 and rows >= (192 if long else 512):
        return "eigh"
    if resolved and rows >= 192 and long:
        return "gram"
    return "symmetric" if rows >= 768 else "plain"


def _polar(
    chunk: Tensor,
    method: str,
    triples: list[Coefficients],
    wide: torch.dtype,
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    if method == "reference":
        return _reference(chunk.to(dtype), triples, eps)
    x = _scaled(chunk.to(wide))
    if method == "eigh":
        return _exact(x)
    x = x.to(dtype)
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
    return _ITERATIONS[method](x, triples)


def _plain(x: Tensor, triples: list[Coefficients]) -> Tensor:
    # a single matrix by the very products of torch.optim.Muon
    alone = len(x) == 1
    x, multiply = (x[0], torch.addmm) if alone else (x, torch.baddbmm)
    for a, b, c in triples:
        gram = x @ x.mT
        gram = multiply(gram, gram, gram, beta=b, alpha=c)
        x = multiply(x, gram, x, beta=a)
    return x[None] if alone else x


def _symmetric(x: Tensor, triples: list[Coefficients]) -> Tensor:
    if _by_triton(x.device, x.dtype):
        from isokron.kernels.triton_symmetric import newton_schulz_

        return newton_schulz_(x, triples)
    for a, b, c in triples:
        gram = symmetric_product(x, x.mT)
        x = torch.baddbmm(x, symmetric_product(gram, gram, gram, b, c), x, beta=a)
    return x


def _by_triton(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype.itemsize <= 4 and verified("symmetric", device)[0]


def _gram_space(x: Tensor, triples: list[Coefficients]) -> Tensor:
    """With H = aI + bA + cA²: X ← HX makes A ← HAH, so A tells all H, and X = H⋯H X₀.

    All are polynomials of the first A: they commute, and their products are symmetric.
    """
    if not triples:
        return x
    gram = symmetric_product(x, x.mT)
    product = gram  # of the factors; the first step overwrites it
    for step, (a, b, c) in enumerate(triples, 1):
        factor = symmetric_product(gram, gram, gram, b, c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if step == 1 else symmetric_product(factor, product)
        if step < len(triples):
            gram = symmetric_product(factor, symmetric_product(factor, gram))
    return product @ x


def _exact(x: Tensor) -> Tensor:
    """(XXᵀ)^(−½) X. Singular values that rounding drowns in XXᵀ come out below one, not above."""
    values, vectors = eigh(symmetric_product(x, x.mT))
    info = torch.finfo(x.dtype)
    floor = (4 * info.eps * values[..., -1:]).clamp(min=info.tiny)
    inverse = values.maximum(floor).rsqrt().unsqueeze(-2)
    return symmetric_product(vectors * inverse, vectors.mT) @ x


def _reference(x: Tensor, triples: list[Coefficients], eps: float) -> Tensor:
    """B = b·A + (c·A)A, X ← a·X + BX: every product and sum rounded where K. Jordan's code does."""
    alone = len(x) == 1
    x = x[0] if alone else x
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + eps)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x[None] if alone else x


_ITERATIONS = {"plain": _plain, "symmetric": _symmetric, "gram": _gram_space}


def _scaled(x: Tensor) -> Tensor:
    """x times the power of two, which rounds nothing, that brings its largest entry near one.

    Without it the norm of a finite matrix may overflow, and that of a tiny one drown in `eps`.
    """
    return x / power_of_two(x.abs().amax((-2, -1)))[:, None, None]
