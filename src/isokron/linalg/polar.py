"""The polar factor UVᵀ of a matrix USVᵀ, exactly or by Newton–Schulz iterations."""

import math

import torch
from torch import Tensor

from isokron.kernels import verified
from isokron.linalg.eigen import eigh, power_of_two
from isokron.linalg.products import symmetric_product
from isokron.polynomials import Choice, Coefficients, schedule

METHODS = ("auto", "plain", "symmetric", "gram", "eigh", "polar", "reference", "differentiable")
DECOMPOSED = ("eigh", "polar")

# Bytes of matrices that are iterated on at a time: what a CPU's caches hold, and enough to keep a
# device busy. It bounds the memory of the intermediate products of a large batch.
CPU_CHUNK = 2**21
DEVICE_CHUNK = 2**28
# From this many rows on, half a product has enough tiles for a large GPU; not measured on one.
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

    The result is detached from the autograd graph, except with method="differentiable".

    Args:
        matrix: real matrices; the result has their dtype.
        steps: number of iterations.
        coefficients: a name in POLYNOMIALS, one triple for all steps, or a list with one triple
            per step. None means "classic", or UVᵀ itself where that takes less time.
        dtype: precision of the iteration. Default: bfloat16 on accelerators and at least float32 on
            the CPU, where half-precision products are many times slower.
        eps: lower bound on the norm that X₀ is divided by.
        method: "plain" is the formula above. "symmetric" computes one triangle of A and of A².
            "gram" iterates on A alone and multiplies X once; not in half precision. "eigh" applies
            the polynomial to the eigenvalues of A. "polar" is UVᵀ, for any `steps`. "reference"
            reproduces Muon's published loop to the bit, by default in bfloat16; "plain" in bfloat16
            reproduces torch.optim.Muon. "differentiable" is "plain" with a graph. "auto" chooses
            the one measured to be fastest (`quickest`).
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
    if method != "differentiable":
        matrix = matrix.detach()
    if matrix.numel() == 0:
        return matrix.clone()
    on_cpu = matrix.device.type == "cpu"
    if dtype is None:
        wide = torch.promote_types(matrix.dtype, torch.float32)
        dtype = wide if on_cpu and method != "reference" else torch.bfloat16
    if method == "gram" and dtype.itemsize < 4:
        raise ValueError(
            f"dtype must be torch.float32 or torch.float64 with method='gram', got {dtype}: A has "
            "the squared condition of X, whose rounding errors grow without bound in half "
            "precision; give dtype=torch.float32, or method='plain'"
        )
    tall = matrix.size(-2) > matrix.size(-1)
    stack = matrix.mT if tall else matrix  # so that A = XXᵀ has the size of the shorter side
    stack = stack.reshape(-1, *stack.shape[-2:])
    if method == "auto":
        rows, cols = stack.shape[-2:]
        method = quickest(rows, cols, matrix.device, dtype, triples)
        if method == "eigh" and coefficients is None:
            method = "polar"
    limit = CPU_CHUNK if on_cpu else DEVICE_CHUNK
    size = max(1, limit // (stack[0].numel() * stack.element_size()))
    if method in DECOMPOSED:
        size = max(size, torch.get_num_threads())  # one matrix per core
    chunks = [_polar(chunk, method, triples, dtype, eps) for chunk in stack.split(size)]
    x = (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).to(matrix.dtype)
    x = x.reshape(*matrix.shape[:-2], *x.shape[-2:])
    return x.mT if tall else x


def quickest(
    rows: int,
    cols: int,
    device: torch.device,
    dtype: torch.dtype,
    triples: list[Coefficients],
) -> str:
    """The fastest method for matrices with rows ≤ cols, as measured by benchmarks/kernels.py."""
    if device.type != "cpu":
        return "symmetric" if rows >= GPU_SYMMETRIC and _by_triton(device, dtype) else "plain"
    # "eigh" and "gram" work on A, and amplify the rounding errors of its smallest eigenvalues by
    # the squared slope at 0; in half precision they are too large for any slope
    slope = math.prod([a for a, _, _ in triples])
    if dtype.itemsize >= 4 and slope**2 * torch.finfo(dtype).eps < 1:
        long = cols >= 2 * rows
        # a graph has no retries of decompositions that fail
        if rows >= (192 if long else 512) and not torch.compiler.is_compiling():
            return "eigh"
        if (long and rows >= 192) or (rows >= 96 and cols >= 3 * rows):
            return "gram"
    return "symmetric" if rows >= 768 else "plain"


def _polar(
    chunk: Tensor, method: str, triples: list[Coefficients], dtype: torch.dtype, eps: float
) -> Tensor:
    if method == "reference":
        return _reference(chunk.to(dtype), triples, eps)
    x = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
    # an exact scaling, without which the norm could overflow or fall below `eps`
    x = x / power_of_two(x.detach().abs().amax((-2, -1)))[:, None, None]
    if method not in DECOMPOSED:  # eigh has no half precision
        x = x.to(dtype)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    # in place only where autograd does not need x again
    x = x / norm if x.requires_grad else x.div_(norm)
    return _ITERATIONS[method](x, triples)


def _plain(x: Tensor, triples: list[Coefficients]) -> Tensor:
    # addmm for a single matrix, to reproduce the rounding of torch.optim.Muon
    single = len(x) == 1
    x, multiply = (x[0], torch.addmm) if single else (x, torch.baddbmm)
    for a, b, c in triples:
        gram = x @ x.mT
        gram = multiply(gram, gram, gram, beta=b, alpha=c)
        x = multiply(x, gram, x, beta=a)
    return x[None] if single else x


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
    """X ← HX with H = aI + bA + cA² implies A ← HAH: iterate on A, then X = H⋯H X₀.

    All factors are polynomials of the first A, so they commute and their products are symmetric.
    """
    if not triples:
        return x
    gram = symmetric_product(x, x.mT)
    product = gram  # replaced in the first step
    for step, (a, b, c) in enumerate(triples, 1):
        factor = symmetric_product(gram, gram, gram, b, c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if step == 1 else symmetric_product(factor, product)
        if step < len(triples):
            gram = symmetric_product(factor, symmetric_product(factor, gram))
    return product @ x


def _by_eigenvalues(x: Tensor, triples: list[Coefficients]) -> Tensor:
    """H⋯H of `_gram_space` is a polynomial of A: the same one of its eigenvalues."""
    values, vectors = eigh(symmetric_product(x, x.mT))
    if values.isnan().any():  # a decomposition failed, or X is not finite
        return _gram_space(x, triples)
    product = torch.ones_like(values)
    for a, b, c in triples:
        factor = a + values * (b + c * values)
        product *= factor
        values = values * factor.square()
    return symmetric_product(vectors * product.unsqueeze(-2), vectors.mT) @ x


def _exact(x: Tensor, _: list[Coefficients]) -> Tensor:
    """(XXᵀ)^(−½) X."""
    values, vectors = eigh(symmetric_product(x, x.mT))
    info = torch.finfo(x.dtype)
    # the floor keeps singular values that are lost to rounding in XXᵀ below one
    floor = (4 * info.eps * values[..., -1:]).clamp(min=info.tiny)
    inverse = values.maximum(floor).rsqrt().unsqueeze(-2)
    return symmetric_product(vectors * inverse, vectors.mT) @ x


def _reference(x: Tensor, triples: list[Coefficients], eps: float) -> Tensor:
    """B = b·A + (c·A)A, X ← a·X + BX, with the rounding of K. Jordan's code."""
    single = len(x) == 1
    x = x[0] if single else x
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + eps)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x[None] if single else x


_ITERATIONS = {
    "plain": _plain,
    "differentiable": _plain,
    "symmetric": _symmetric,
    "gram": _gram_space,
    "eigh": _by_eigenvalues,
    "polar": _exact,
}
