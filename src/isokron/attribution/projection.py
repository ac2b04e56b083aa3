"""Projection of gradients: whitened by the curvature, then folded into short rows.

A layer's gradient ∇ = Σ_s g̃āᵀ is whitened to W, such that ⟨W_q, W_t⟩ = ⟨∇_q, H⁻¹∇_t⟩:

    no curvature           W = ∇
    K-FAC, TKFAC, Shampoo  W = L_G⁻¹ ∇ L_A⁻ᵀ              L_G, L_A: Cholesky factors of damped sides
    EK-FAC                 W = (Λ + λ)^(−½) ⊙ Q_Gᵀ∇Q_A

and W [o, i] is folded to D numbers: entry (r, c), times random signs s_r s_c, is added to number
(r·i + c) mod D. Products of rows estimate ⟨W_q, W_t⟩ without bias, since the signs of two entries
that are added are independent, and with a standard error of about |W_q||W_t|/√D. D and i have no
common divisor, so that entries of one row or column collide no more often than any others. This is
a count sketch (Charikar et al. 2002) with the signs and indices of a tensor sketch (Pham & Pagh
2013). The usual random matrix for either side has a larger error if ∇ is of low rank.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, gcd, log2
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isokron.attribution.score import CHUNK, gradient
from isokron.curvature import Curvature
from isokron.curvature.backward import Passes
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood, Loss
from isokron.curvature.statistics import Uses
from isokron.linalg import eigh
from isokron.operators import CholeskyInverse, Factor, Kron, KronEigen

# version of the mapping from (seed, layer) to signs and indices; recorded in every store
GENERATOR = "shake-256 fold v1"
LEAST_DIM = 16

# rows [n, D] of a batch, and the losses [n] of its examples
Take = Callable[[Tensor, Tensor], None]


def signs(seed: int, layer: str, side: str, size: int) -> Tensor:
    """Random ±1 [size] of a layer's side, the same on every machine and device."""
    text = f"isokron {GENERATOR} {seed} {side} {layer}"
    digest = hashlib.shake_256(text.encode()).digest(-(-size // 8))
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), count=size)
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1)


def width(layer: Layer, dim: int) -> int:
    """D, the width of a layer in a row: dim² or slightly less, or the size of a small layer."""
    blocks, outputs, inputs = layer.shape
    limit = dim * dim
    if blocks * outputs * inputs <= limit:
        return blocks * outputs * inputs
    return next(size for size in range(limit, 0, -1) if gcd(size, inputs) == 1)


@dataclass(frozen=True, eq=False)
class Encoder:
    """Rows of one layer: fold(scale ⊙ L∇Rᵀ).

    left: L [B, o, o], or [B, o] where it is diagonal; right: R [B, i, i] or [1, i]. Both include
    the random signs. scale: [B, o, i] or None.
    """

    layer: Layer
    width: int
    left: Tensor
    right: Tensor
    scale: Tensor | None = None

    def rows(self, uses: Uses) -> Tensor:
        """Rows of the examples of a batch: [N, D]"""
        if uses.kind == "diagonal":  # the sides of a norm are its parameters and their entries
            signed = gradient(self.layer, uses) * self.left[..., None] * self.right[:, None]
            return self._folded(signed)
        # whitened by position, since positions are smaller than the gradients
        grads = _times(uses.grads, self.left)
        inputs = _times(uses.written().inputs, self.right)
        step = max(1, CHUNK // self.layer.parameters)
        pairs = zip(grads.split(step, 1), inputs.split(step, 1), strict=True)
        return torch.cat([self._folded((g.mT @ a).movedim(0, 1)) for g, a in pairs])

    def _folded(self, matrices: Tensor) -> Tensor:
        """[N, B, o, i] → [N, D]"""
        flat = (matrices if self.scale is None else matrices * self.scale).flatten(1)
        complete = flat.size(1) // self.width * self.width
        rows = flat[:, :complete].view(len(flat), -1, self.width).sum(1)
        rows[:, : flat.size(1) - complete] += flat[:, complete:]
        return rows


def _times(rows: Tensor, side: Tensor) -> Tensor:
    """XMᵀ, with one product per block. X [B, N, S, d], M [B, d, d] or its diagonal [B, d]"""
    if side.ndim == 2:
        return rows * side[:, None, None]
    return (rows.flatten(1, 2) @ side.mT).unflatten(1, rows.shape[1:3])


def encoders(
    layers: Iterable[Layer],
    dim: int,
    seed: int,
    inverse: Curvature | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Encoder]:
    """An encoder for each layer. inverse: the damped H⁻¹, None for the identity."""
    by_name = {}
    for layer in layers:
        blocks, outputs, inputs = layer.shape
        left = signs(seed, layer.name, "output", blocks * outputs).view(blocks, outputs)
        right = signs(seed, layer.name, "input", inputs)[None]
        left, right, scale = left.to(device, dtype), right.to(device, dtype), None
        if inverse is not None:
            whiten_left, whiten_right, scale = _whitening(inverse[layer.name])
            left, right = _signed(left, whiten_left), _signed(right, whiten_right)
            scale = None if scale is None else scale.to(device, dtype)
        by_name[layer.name] = Encoder(layer, width(layer, dim), left, right, scale)
    return by_name


def _signed(side_signs: Tensor, matrix: Tensor | None) -> Tensor:
    return side_signs if matrix is None else side_signs[..., None] * matrix.to(side_signs)


def _whitening(inverse: Kron | KronEigen) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """L, R and scale of a whitening W = scale ⊙ L∇Rᵀ with WᵀW = H⁻¹."""
    if isinstance(inverse, KronEigen):
        left, right = (None if basis is None else basis.mT for basis in inverse.bases)
        return left, right, inverse.eigenvalues.clamp_min(0).sqrt()
    left, right = (_half(factor) for factor in inverse.factors)
    return left, right, None


def _half(factor: Factor) -> Tensor:
    """M with MᵀM equal to the factor: [B, n, n]"""
    if isinstance(factor, CholeskyInverse):
        identity = torch.eye(factor.lower.size(-1)).to(factor.lower)
        return torch.linalg.solve_triangular(factor.lower, identity, upper=False)
    # blocks without a gradient are 0 and have no Cholesky factor
    values, vectors = eigh(factor.to_dense())
    return values.clamp_min(0).sqrt()[..., None] * vectors.mT


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | Likelihood,
    by_name: dict[str, Encoder],
    take: Take,
) -> None:
    """Call `take` with the rows of every batch and the losses of its examples."""
    parts: dict[str, Tensor] = {}
    layers = [encoder.layer for encoder in by_name.values()]
    # half-precision models are computed in the precision of the encoders
    dtype = next(iter(by_name.values())).left.dtype
    passes = Passes(model, batches, loss, layers, dtype=dtype, weighting="linear")

    def fold(layer: Layer, uses: Uses) -> None:
        rows = by_name[layer.name].rows(uses)
        earlier = parts.get(layer.name)
        parts[layer.name] = rows if earlier is None else earlier + rows

    def after() -> None:
        # a batch may not use a layer, such as an expert: its columns are 0
        zeros = passes.losses.new_zeros(len(passes.losses), 1, dtype=dtype)
        rows = [
            parts.get(name, zeros.expand(-1, encoder.width)) for name, encoder in by_name.items()
        ]
        take(torch.cat(rows, 1), passes.losses)
        parts.clear()

    passes.over(fold, after, check=False)


def choose_dim(
    layers: Sequence[Layer],
    examples: int,
    memory: int,
    measure: Callable[[int], float],
    least: float,
) -> int | None:
    """A small power of two, at least 16, whose measured Spearman is at least `least`.

    memory: limit of the store, in bytes. None if no store within it is good enough.
    """
    largest = max(layer.parameters for layer in layers)
    dim = LEAST_DIM
    while True:
        numbers = sum(width(layer, dim) for layer in layers)
        if 4 * examples * numbers > memory:
            return None
        correlation = measure(dim)
        if correlation >= least:
            return dim
        if dim * dim >= largest:  # a larger store would not differ
            return None
        # ρ²/(1 − ρ²) grows with dim², as the variance of the noise falls: skip to the largest
        # power of two below the dimension that this predicts
        odds = max(correlation, 0.05) ** 2 / (1 - min(correlation, least) ** 2)
        wanted = dim * (least**2 / (1 - least**2) / odds) ** 0.5
        dim = max(2 * dim, 2 ** min(int(log2(wanted)), ceil(log2(largest) / 2)))
