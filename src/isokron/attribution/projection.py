"""Gradients of examples as rows of numbers: complete, projected, or whitened and projected.

A layer's gradient ∇ = Σ_s g̃āᵀ becomes L∇Rᵀ, of which ∇ itself is never made:

    complete    L, R = I
    projected   L = P_l, R = P_r                random, E[PᵀP] = I
    whitened    L = P_l L_G⁻¹, R = P_r L_A⁻¹    L_G L_Gᵀ = G + √λ/π, L_A L_Aᵀ = A + π√λ (Cholesky)

Products of whitened rows estimate ⟨∇_q, H⁻¹∇_t⟩, H = (G + √λ/π) ⊗ (A + π√λ), without bias, since
E[LᵀL] = L_G⁻ᵀ E[PᵀP] L_G⁻¹ = (G + √λ/π)⁻¹ for any such P; where P = I they are equal to it. With
normal entries P L_G⁻¹ has the distribution of P (G + √λ/π)^(−½), from which it differs by a
rotation; with signs the means are the same, fourth moments are not. No eigenvectors are needed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature import Curvature, side_damping
from isokron.curvature.backward import Passes
from isokron.curvature.curvature import Operator, dead_blocks
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood, Loss
from isokron.curvature.statistics import Uses
from isokron.linalg import factorize
from isokron.operators import Dense, Kron, KronEigen

# Version of the mapping from (seed, layer, side, row, column) to entries: stores are bound to it.
GENERATOR = "philox4x32-10 v1"
SIDES = ("output", "input")
# Consecutive columns of one row that one call of the generator gives.
KINDS = {"rademacher": 128, "normal": 4}
CALLS = 1 << 15  # of the generator at once: its int64 words stay in the cache
LEAST_DIM = 16

# Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011)
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by each round: golden ratio, √3 − 1

Words = tuple[Tensor, Tensor, Tensor, Tensor]
# rows [n, D] of a batch, and the losses [n] of its examples
Take = Callable[[Tensor, Tensor], None]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four words in [0, 2³²), as int64, of counters of four words each; shapes broadcast."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        high_a, low_a = _multiply(a, MULTIPLIERS[0])
        high_c, low_c = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a
        left, right = (left + WEYL[0]) & MASK, (right + WEYL[1]) & MASK
    return a, b, c, d


def _multiply(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word of x · by, both below 2³²; halves of `by` keep products below 2⁴⁸."""
    upper, lower = x * (by >> 16), x * (by & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & MASK


@dataclass(frozen=True)
class Projection:
    """P [p, n] with independent entries of mean 0 and variance 1/p, so that E[PᵀP] = I.

    `dim`: p. Entry (row, column) depends on seed, layer, side, row and column alone: a smaller P is
    the corner of a larger one, but for the scale 1/√p. Every device has
    the same. Kinds: "rademacher" is ±1, "normal" is computed in float64 and rounded to float32.
    """

    dim: int
    kind: str = "rademacher"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or not 1 <= self.dim < 1 << 32:
            raise ValueError(f"dim must be a whole number of at least 1, got {self.dim!r}")
        if self.kind not in KINDS or not isinstance(self.seed, int):
            wrong = f"{self.kind!r} and {self.seed!r}"
            raise ValueError(f"kind must be one of {tuple(KINDS)} and seed whole, got {wrong}")

    def matrix(
        self,
        layer: str,
        side: str,
        size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """P [p, size] of a layer's side, "output" or "input"."""
        if size < 1 or side not in SIDES or not dtype.is_floating_point:
            raise ValueError(
                f"matrix needs a size of at least 1, a side of {SIDES} and a floating dtype, got "
                f"{size}, {side!r} and {dtype} for layer {layer!r}"
            )
        # the 1 is part of GENERATOR: another number would make other matrices
        text = json.dumps(["isokron projection", 1, self.seed, layer, side])
        digest = hashlib.sha256(text.encode()).digest()
        key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
        width, wide = KINDS[self.kind], torch.promote_types(dtype, torch.float32)
        # on the CPU: the bits, and the roundings of normal entries, are then those of all devices
        blocks = torch.arange(-(-size // width))
        entries = torch.empty(self.dim, len(blocks) * width, dtype=wide)
        rows = max(1, CALLS // len(blocks))
        for top in range(0, self.dim, rows):
            row = torch.arange(top, min(top + rows, self.dim))[:, None]
            words = philox((blocks & MASK, blocks >> 32, row, torch.zeros_like(row)), key)
            stacked = torch.stack(words, -1)  # [rows, blocks, 4]
            values = _signs(stacked, wide) if self.kind == "rademacher" else _normals(stacked)
            entries[top : top + rows] = values.reshape(len(row), -1)
        return entries[:, :size].mul_(self.dim**-0.5).contiguous().to(device, dtype)


def _signs(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Bit 0 of a word is its first column: 1 → +1, 0 → −1. [..., 4] → [..., 4 · 32]"""
    octets = (words[..., None] >> torch.arange(0, 32, 8)) & 0xFF
    return _sign_table(dtype).index_select(0, octets.flatten())


@cache
def _sign_table(dtype: torch.dtype) -> Tensor:
    """The eight signs of every byte: one look-up makes eight entries. [256, 8]"""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (2 * bits - 1).to(dtype)


def _normals(words: Tensor) -> Tensor:
    """Box–Muller: √(−2 ln u) · (cos 2πv, sin 2πv), u in (0, 1), v in [0, 1). [..., 4] → [..., 4]"""
    pairs = words.double().unflatten(-1, (2, 2))  # [..., 2, (u, v)]
    radius = (-2 * torch.log((pairs[..., 0] + 0.5) * 2.0**-32)).sqrt()
    angle = pairs[..., 1] * (2 * torch.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).float()


@dataclass(frozen=True, eq=False)
class Encoder:
    """Rows of one layer. left: [B or 1, p, o], right: [B or 1, p, i], None for I.

    `scale`: [o, i], which a layer of kind "diagonal" is multiplied by; of the two sides of such a
    layer, which are its parameters and their entries, only the right one is ever projected.
    """

    layer: Layer
    left: Tensor | None = None
    right: Tensor | None = None
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        blocks, outputs, inputs = self.layer.shape
        left = outputs if self.left is None else self.left.size(1)
        return blocks, left, inputs if self.right is None else self.right.size(1)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def rows(self, uses: Uses) -> Tensor:
        """L∇Rᵀ of every example of a batch: [N, size]"""
        if uses.kind == "diagonal":
            weight = {"weight": uses.grads * uses.inputs, "bias": uses.grads}  # [1, N, S, d]
            params = [weight[key].sum((0, 2)) for key in self.layer.layout.params]
            return self.matrices(torch.stack(params, 1)[:, None])
        grads = uses.grads if self.left is None else _projected(uses.grads, self.left)
        if self.right is None:
            inputs = uses.written().inputs
        else:
            inputs = _projected(uses.inputs, self.right, uses.bias)
        return (grads.mT @ inputs).movedim(0, 1).flatten(1)

    def matrices(self, gradients: Tensor) -> Tensor:
        """The same of gradients themselves: [N, B, o, i] → [N, size]"""
        x = gradients if self.scale is None else gradients * self.scale
        x = x if self.left is None else self.left @ x
        x = x if self.right is None else x @ self.right.mT
        return x.flatten(1)

    def pulled(self, rows: Tensor) -> Tensor:
        """LᵀXR, of which ⟨·, ∇⟩ is ⟨X, L∇Rᵀ⟩: [Q, size] → [Q, B, o, i]"""
        x = rows.unflatten(1, self.shape)
        x = x if self.left is None else self.left.mT @ x
        x = x if self.right is None else x @ self.right
        return x if self.scale is None else x * self.scale


@dataclass(frozen=True, eq=False)
class Encoding:
    """How gradients become rows: all layers side by side."""

    encoders: Mapping[str, Encoder]

    @property
    def layers(self) -> list[Layer]:
        return [encoder.layer for encoder in self.encoders.values()]

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return sum(encoder.size for encoder in self.encoders.values())

    def columns(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what every layer has in a row, in their order."""
        return {name: encoder.shape for name, encoder in self.encoders.items()}

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of every layer's part of rows: [N, D] → [N, size]"""
        parts = rows.split([encoder.size for encoder in self.encoders.values()], 1)
        return dict(zip(self.encoders, parts, strict=True))

    def matrices(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Rows of gradients [N, B, o, i] by layer: [N, D]"""
        parts = [encoder.matrices(gradients[name]) for name, encoder in self.encoders.items()]
        return torch.cat([part.to(parts[0].device) for part in parts], 1)

    def pulled(self, rows: Tensor) -> dict[str, Tensor]:
        """Matrices by layer whose products with gradients are those of `rows` with theirs."""
        parts = self.split(rows)
        return {name: encoder.pulled(parts[name]) for name, encoder in self.encoders.items()}


def encoding(
    layers: Iterable[Layer],
    projection: Projection | None = None,
    *,
    whiten: Curvature | None = None,
    damping: float = 0.1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Encoding:
    """How gradients of these layers become rows.

    Args:
        layers: of kind "dense" or "diagonal".
        projection: sides larger than its `dim` become that small; None for complete gradients.
        whiten: curvature of two sides, folded into the rows.
        damping: λ of both sides, as a multiple of each layer's mean eigenvalue.
        dtype: of the matrices, and so of the rows.
        device: of the matrices; None for that of each layer.
    """
    encoders = {}
    for layer in layers:
        if layer.kind == "index":
            raise ValueError(
                f"layer {layer.name!r} is an embedding, whose projection is mostly noise; leave it "
                "out of the store, or score exactly"
            )
        where = next(layer.module.parameters()).device if device is None else device
        like = torch.empty(0, dtype=dtype, device=where)
        encoder = Encoder(layer, *(_random_side(projection, layer, side, like) for side in (0, 1)))
        if whiten is not None:
            encoder = _whitened(encoder, whiten[layer.name], damping, like)
        encoders[layer.name] = encoder
    return Encoding(encoders)


def _random_side(
    projection: Projection | None, layer: Layer, side: int, like: Tensor
) -> Tensor | None:
    """P of a side [1, p, n], the same for all blocks; None where it would not be smaller."""
    size = layer.shape[1 + side]
    diagonal = side == 0 and layer.kind == "diagonal"
    if projection is None or size <= projection.dim or diagonal:
        return None
    return projection.matrix(layer.name, SIDES[side], size, like.dtype, like.device)[None]


def _whitened(plain: Encoder, operator: Operator, damping: float, like: Tensor) -> Encoder:
    name = plain.layer.name
    if isinstance(operator, KronEigen) and plain.layer.kind == "diagonal":
        values = operator.eigenvalues[0].clamp_min(0).to(like.device)  # [o, i]
        lifted = values + damping * values.mean()
        # without a gradient there is no curvature either, and the row is 0
        scale = torch.where(lifted > 0, lifted, torch.inf) ** -0.5
        return replace(plain, scale=scale.to(like))
    if not isinstance(operator, Kron) or not all(isinstance(f, Dense) for f in operator.factors):
        raise ValueError(
            f"layer {name!r} cannot be whitened: eigenvalues of method 'ekfac' belong to neither "
            "side, and a side of low rank has no Cholesky factor; fit method 'kfac' with "
            "policy='none', leave the layer out of the store, or score exactly"
        )
    halves = [
        _half(factor.to_dense().to(like.device), added, start, f"a side of layer {name!r}")
        for factor, added, start in zip(
            operator.factors,
            side_damping(operator, damping),
            (plain.left, plain.right),
            strict=True,
        )
    ]
    # a block that never had a gradient, or an input, has no curvature: its rows are 0
    dead = dead_blocks(operator).to(like.device)[:, None, None]
    return Encoder(plain.layer, *(half.masked_fill(dead, 0.0).to(like) for half in halves))


def _half(side: Tensor, added: Tensor, start: Tensor | None, name: str) -> Tensor:
    """P L⁻¹, LLᵀ = C + λ. side C: [B, n, n], λ: [B], start P: [1, p, n], None for I."""
    identity = torch.eye(side.size(1)).to(side)
    lower = factorize(side + added.to(side)[:, None, None] * identity, name=name).lower
    first = (identity[None] if start is None else start).to(lower).expand(len(side), -1, -1)
    return torch.linalg.solve_triangular(lower, first, upper=False, left=False)


def _projected(rows: Tensor, matrix: Tensor, bias: bool = False) -> Tensor:
    """XPᵀ, or [X, 1]Pᵀ with a bias. [B, N, S, d], [B or 1, p, d] → [B, N, S, p]"""
    # one large product a block: a small one an example is slower
    flat, matrix = rows.flatten(1, 2), matrix.expand(len(rows), -1, -1)
    if bias:
        result = torch.baddbmm(matrix[:, None, :, -1], flat, matrix[:, :, :-1].mT)
    else:
        result = flat @ matrix.mT
    return result.unflatten(1, rows.shape[1:3])


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | Likelihood,
    encoding: Encoding,
    take: Take,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give the rows of every batch, and the losses of its examples, to `take`. An example's
    gradient is that of the sum of its terms; models of less precision are computed in `dtype`."""
    rows: list[Tensor] = []  # of the batch
    layers = encoding.layers
    passes = Passes(model, batches, loss, layers, dtype=dtype, weighting="linear")

    def of_batch() -> Tensor:
        if not rows:
            count = len(passes.losses)
            rows.append(passes.losses.new_zeros(count, encoding.width, dtype=dtype))
        return rows[0]

    def fold(layer: Layer, uses: Uses) -> None:
        part = encoding.encoders[layer.name].rows(uses)
        encoding.split(of_batch())[layer.name].add_(part.to(of_batch().device))

    def after() -> None:
        take(of_batch(), passes.losses)
        rows.clear()

    # a batch may use none of a layer, as of an expert: its part of the rows stays 0
    passes.over(fold, after, check=False)


def row_width(layers: Iterable[Layer], dim: int) -> int:
    """Numbers in a row of a projection to `dim`."""
    total = 0
    for layer in layers:
        blocks, outputs, inputs = layer.shape
        left = outputs if layer.kind == "diagonal" else min(outputs, dim)
        total += blocks * left * min(inputs, dim)
    return total


def choose_dim(
    layers: Sequence[Layer],
    examples: int,
    memory: int,
    measure: Callable[[int], float],
    least: float = 0.9,
    itemsize: int = 4,
) -> tuple[int | None, float]:
    """The smallest power of two from 16 on whose measured Spearman is at least `least`, and that.
    `memory`: bytes of a store of so many examples; `measure(dim)`: Spearman of projected with exact
    scores. Where no such store does, None and 1: score exactly.
    """
    dim, largest = LEAST_DIM, max(max(layer.shape[1:]) for layer in layers)
    while examples * row_width(layers, dim) * itemsize <= memory:
        if (correlation := measure(dim)) >= least:
            return dim, correlation
        if dim >= largest:  # nothing is projected any more
            break
        dim *= 2
    return None, 1.0
