"""Projection of gradients: whitened by the curvature, of which the largest entries are stored.

A layer's gradient ∇ = Σ_s g̃āᵀ is whitened to W, such that ⟨W_q, W_t⟩ = ⟨∇_q, H⁻¹∇_t⟩:

    no curvature           W = ∇
    K-FAC, TKFAC, Shampoo  W = L_G⁻¹ ∇ L_A⁻ᵀ              L_G, L_A: Cholesky factors of damped sides
    EK-FAC                 W = (Λ + λ)^(−½) ⊙ Q_Gᵀ∇Q_A

A row has the D entries of W whose share W²/|W|² is largest in the mean over a sample of examples.
With shares v, those left out are missing from a product ⟨W_q, W_t⟩ with a variance of about Σv², a
sum of small squares. A random projection to D numbers (count sketch, Gaussian or orthogonal
matrices) is unbiased but adds noise of variance (Σv)²/D, and ranks examples worse unless D is large
(docs/attribution.md). Shares are used because the mean of W² would be decided by a few examples
with large losses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any

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

LEAST_DIM = 16
TINY = 1e-30

# rows [n, D] of a batch, the losses [n] of its examples, and their ⟨∇, H⁻¹∇⟩ [n]
Take = Callable[[Tensor, Tensor, Tensor], None]


def width(layer: Layer, dim: int) -> int:
    """D, the width of a layer in a row: dim², or the size of a smaller layer."""
    return min(dim * dim, layer.parameters)


@dataclass(frozen=True, eq=False)
class Encoder:
    """Rows of one layer: entries of W = scale ⊙ L∇Rᵀ.

    left: L [B, o, o]; right: R [B, i, i]; scale: [B, o, i]; each None for the identity. entries:
    indices [D] into the flat W, or None for all of it.
    """

    layer: Layer
    left: Tensor | None
    right: Tensor | None
    scale: Tensor | None
    dtype: torch.dtype
    entries: Tensor | None = None

    @property
    def width(self) -> int:
        return self.layer.parameters if self.entries is None else len(self.entries)

    def rows(self, uses: Uses) -> tuple[Tensor, Tensor]:
        """Rows [N, D] and |W|² [N] of the examples of a batch."""
        parts = [(self._stored(part), part.square().sum(1)) for part in self.whitened(uses)]
        rows, squares = zip(*parts, strict=True)
        return torch.cat(rows), torch.cat(squares)

    def whitened(self, uses: Uses) -> Iterator[Tensor]:
        """The flat W of the examples of a batch, a few at a time: [n, B·o·i]"""
        if uses.kind == "diagonal":  # a norm's curvature is diagonal, without sides
            yield self._scaled(gradient(self.layer, uses))
            return
        # whitened by position, since positions are smaller than the gradients
        grads = _times(uses.grads, self.left)
        inputs = _times(uses.written().inputs, self.right)
        step = max(1, CHUNK // self.layer.parameters)
        for g, a in zip(grads.split(step, 1), inputs.split(step, 1), strict=True):
            yield self._scaled((g.mT @ a).movedim(0, 1))

    def _scaled(self, matrices: Tensor) -> Tensor:
        return (matrices if self.scale is None else matrices * self.scale).flatten(1)

    def _stored(self, flat: Tensor) -> Tensor:
        return flat if self.entries is None else flat[:, self.entries]


def _times(rows: Tensor, side: Tensor | None) -> Tensor:
    """XMᵀ, with one product per block. X [B, N, S, d], M [B, d, d]"""
    if side is None:
        return rows
    return (rows.flatten(1, 2) @ side.mT).unflatten(1, rows.shape[1:3])


def encoders(
    layers: Iterable[Layer],
    inverse: Curvature | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Encoder]:
    """An encoder of all of W for each layer. inverse: the damped H⁻¹, None for the identity."""
    by_name = {}
    for layer in layers:
        parts = (None,) * 3 if inverse is None else _whitening(inverse[layer.name])
        left, right, scale = (None if x is None else x.to(device, dtype) for x in parts)
        by_name[layer.name] = Encoder(layer, left, right, scale, dtype)
    return by_name


def entry_shares(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | Likelihood,
    by_name: Mapping[str, Encoder],
) -> dict[str, Tensor]:
    """Σ W²/|W|² over the examples, by layer: [B·o·i]"""
    totals = {
        name: torch.zeros(encoder.layer.parameters, dtype=encoder.dtype)
        for name, encoder in by_name.items()
    }
    layers = [encoder.layer for encoder in by_name.values()]
    dtype = next(iter(by_name.values())).dtype
    passes = Passes(model, batches, loss, layers, dtype=dtype, weighting="linear")

    def fold(layer: Layer, uses: Uses) -> None:
        for part in by_name[layer.name].whitened(uses):
            squares = part.square()
            shares = squares / squares.sum(1, keepdim=True).clamp_min(TINY)
            totals[layer.name] += shares.sum(0).cpu()

    passes.over(fold, check=False)
    return totals


def largest_entries(shares: Mapping[str, Tensor], dim: int) -> dict[str, Tensor]:
    """The dim² entries of each layer with the largest shares, in ascending order: [D], int32"""
    largest = {name: x.topk(min(dim * dim, len(x))).indices for name, x in shares.items()}
    return {name: indices.sort().values.int() for name, indices in largest.items()}


def with_entries(
    by_name: Mapping[str, Encoder], entries: Mapping[str, Tensor], device: torch.device | str
) -> dict[str, Encoder]:
    """The same encoders, for rows that have only these entries."""
    return {
        # a layer that is stored in full is not gathered
        name: replace(encoder, entries=entries[name].long().to(device))
        if len(entries[name]) < encoder.layer.parameters
        else encoder
        for name, encoder in by_name.items()
    }


def _whitening(inverse: Kron | KronEigen) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """L, R and scale of a whitening W = scale ⊙ L∇Rᵀ with WᵀW = H⁻¹."""
    if isinstance(inverse, KronEigen):
        inverse = inverse.completed()
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
    """Call `take` with the rows, losses and ⟨∇, H⁻¹∇⟩ of the examples of every batch."""
    parts: dict[str, Tensor] = {}
    layer_squares: list[Tensor] = []
    layers = [encoder.layer for encoder in by_name.values()]
    # half-precision models are computed in the precision of the encoders
    dtype = next(iter(by_name.values())).dtype
    passes = Passes(model, batches, loss, layers, dtype=dtype, weighting="linear")

    def fold(layer: Layer, uses: Uses) -> None:
        rows, squares = by_name[layer.name].rows(uses)
        earlier = parts.get(layer.name)
        parts[layer.name] = rows if earlier is None else earlier + rows
        layer_squares.append(squares)

    def after() -> None:
        # a batch may not use a layer, such as an expert: its columns are 0
        zeros = passes.losses.new_zeros(len(passes.losses), 1, dtype=dtype)
        rows = [
            parts.get(name, zeros.expand(-1, encoder.width)) for name, encoder in by_name.items()
        ]
        take(torch.cat(rows, 1), passes.losses, sum(layer_squares, zeros[:, 0]))
        parts.clear()
        layer_squares.clear()

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
        # ρ²/(1 − ρ²) grows no faster than dim², the number of entries: skip to the largest power
        # of two below the dimension that this predicts
        odds = max(correlation, 0.05) ** 2 / (1 - min(correlation, least) ** 2)
        wanted = dim * (least**2 / (1 - least**2) / odds) ** 0.5
        dim = max(2 * dim, 2 ** min(int(log2(wanted)), ceil(log2(largest) / 2)))
