"""The polar factor of a matrix: U Vᵀ where the matrix is U S Vᵀ, by matrix products alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

# Odd quintics p(x) = a x + b x³ + c x⁵, applied to every singular value at once.
# "classic": the slope at zero is as large as it can be while [0, 1] stays near 1 (K. Jordan, 2024).
# "exact": the Taylor polynomial; slow from small singular values, but converges to 1 to the bit.
POLYNOMIALS: dict[str, Coefficients] = {
    "classic": (3.4445, -4.7750, 2.0315),
    "exact": (15 / 8, -10 / 8, 3 / 8),
}


# So many bytes of matrices are iterated on at a time: what the caches of a CPU hold, and enough to
# keep a device busy. It bounds the memory that the intermediate products of a large batch take.
CPU_CHUNK = 2**21
DEVICE_CHUNK = 2**28


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    coefficients: str | Coefficients | Sequence[Coefficients] = "classic",
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
) -> Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, from X₀ = matrix/‖matrix‖, `steps` times. [..., m, n]

    `coefficients`: a name in POLYNOMIALS, one triple for all steps, or one triple a step.
    `dtype`: of the iteration; by default bfloat16 on accelerators and at least float32 on CPU,
    where half-precision products are many times slower.
    """
    if matrix.ndim < 2:
        raise ValueError(
            f"newton_schulz needs matrices [..., m, n], got shape {tuple(matrix.shape)}"
        )
    triples = schedule(coefficients, steps)
    if matrix.numel() == 0:
        return matrix.clone()
    wide = torch.promote_types(matrix.dtype, torch.float32)
    if dtype is None:
        dtype = wide if matrix.device.type == "cpu" else torch.bfloat16
    tall = matrix.size(-2) > matrix.size(-1)
    stack = matrix.mT if tall else matrix  # A = XXᵀ is then on the short side
    stack = stack.reshape(-1, *stack.shape[-2:])
    limit = CPU_CHUNK if matrix.device.type == "cpu" else DEVICE_CHUNK
    chunks = stack.split(max(1, limit // (stack[0].numel() * stack.element_size())))
    parts = [_iterate_(_scaled(chunk.to(wide)).to(dtype), triples, eps) for chunk in chunks]
    x = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(matrix.dtype)
    x = x.reshape(*matrix.shape[:-2], *x.shape[-2:])
    return x.mT if tall else x


def _iterate_(x: Tensor, triples: Sequence[Coefficients], eps: float) -> Tensor:
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
    for a, b, c in triples:
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


def _scaled(x: Tensor) -> Tensor:
    """x times the power of two, which rounds nothing, that brings its largest entry near one.

    Without it the norm of a finite matrix may overflow, and that of a tiny one drown in `eps`.
    """
    low, high = x.flatten(1).aminmax(dim=1)
    exponent = torch.frexp(torch.maximum(-low, high)).exponent
    return torch.ldexp(x, -exponent.view(-1, 1, 1))


def schedule(
    coefficients: str | Coefficients | Sequence[Coefficients], steps: int
) -> Sequence[Coefficients]:
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be an integer of at least 0, got {steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in POLYNOMIALS:
            raise ValueError(
                f"coefficients must be one of {sorted(POLYNOMIALS)} or triples (a, b, c), "
                f"got {coefficients!r}"
            )
        return [POLYNOMIALS[coefficients]] * steps
    triples = list(coefficients)
    if len(triples) == 3 and all(isinstance(c, (int, float)) for c in triples):
        a, b, c = triples
        return [(a, b, c)] * steps  # type: ignore[list-item]
    if len(triples) != steps or any(
        not isinstance(triple, Sequence) or len(triple) != 3 for triple in triples
    ):
        raise ValueError(
            f"coefficients must be one triple (a, b, c) or one a step ({steps}), "
            f"got {coefficients!r}"
        )
    return triples  # type: ignore[return-value]
