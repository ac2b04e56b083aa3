"""Gradients of examples as rows of numbers: whole, projected, or whitened and projected.

A layer's gradient ∇ = Σ_s g̃āᵀ becomes L∇Rᵀ, of which ∇ itself is never made:

    whole       L, R = I
    projected   L = P_l, R = P_r                       random, E[PᵀP] = I
    whitened    L = P_l C_G^(−½), R = P_r C_A^(−½)     C: sides of the curvature, damped
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from isokron.attribution.projection import Projection
from isokron.attribution.sides import check_separable, random_side, whitened_sides
from isokron.curvature import Curvature
from isokron.curvature.sites import Site
from isokron.curvature.statistics import Uses

SCOPES = ("layer", "global")


@dataclass(frozen=True, eq=False)
class Encoder:
    """Of one layer. left: [B, p, o], right: [B, p, i], None for I.

    `scale`: [o, i], which a layer of kind "diagonal" is multiplied by; only its right side is ever
    projected.
    """

    site: Site
    left: Tensor | None = None
    right: Tensor | None = None
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        blocks, outputs, inputs = self.site.layout.shape
        left = outputs if self.left is None else self.left.size(1)
        return blocks, left, inputs if self.right is None else self.right.size(1)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def rows(self, uses: Uses, tokens: bool = False) -> Tensor:
        """What all examples of a batch have: [N, size], or [N, S, size] for every position."""
        if uses.kind == "diagonal":
            return self._diagonal(uses, tokens)
        grads = uses.grads if self.left is None else _projected(uses.grads, self.left)
        if uses.kind == "index":
            return self._index(uses.inputs, grads, tokens)
        if self.right is None:
            inputs = uses.written().inputs
        else:
            inputs = _projected(uses.inputs, self.right, uses.bias)
        if tokens:
            found = grads[..., :, None] * inputs[..., None, :]  # [B, N, S, p, p]
            return found.movedim(0, 2).flatten(2)
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

    def _diagonal(self, uses: Uses, tokens: bool) -> Tensor:
        of = {"weight": uses.grads * uses.inputs, "bias": uses.grads}  # [1, N, S, d]
        rows = torch.stack([of[key][0] for key in self.site.layout.params], 2)  # [N, S, o, d]
        rows = rows if tokens else rows.sum(1)
        rows = rows if self.scale is None else rows * self.scale
        rows = rows if self.right is None else rows @ self.right[0].mT
        return rows.flatten(2 if tokens else 1)

    def _index(self, numbers: Tensor, grads: Tensor, tokens: bool) -> Tensor:
        """numbers: [1, N, S], −1 for what never learns; grads: [1, N, S, p]."""
        known = numbers[0] >= 0
        column = numbers[0].clamp_min(0)
        grads = grads[0] * known[..., None]
        if self.right is not None:
            inputs = self.right[0].mT[column]  # [N, S, p]
            if tokens:
                return (grads[..., :, None] * inputs[..., None, :]).flatten(2)
            return (grads.mT @ inputs).flatten(1)
        examples, places, outputs = grads.shape
        shape = (examples, places) if tokens else (examples,)
        found = grads.new_zeros(*shape, self.site.columns, outputs)
        where = column[..., None, None].expand(-1, -1, 1, outputs)
        if tokens:
            found.scatter_(2, where, grads[:, :, None])
        else:
            found.scatter_add_(1, where[:, :, 0], grads)
        return found.mT.flatten(len(shape))


@dataclass(frozen=True, eq=False)
class Encoding:
    """All layers, side by side in one row; or projected to one vector together (`flat`)."""

    encoders: Mapping[str, Encoder]
    flat: Projection | None = None

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.flat.dim if self.flat else sum(each.size for each in self.encoders.values())

    def columns(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what every layer has in a row, in their order."""
        if self.flat:
            return {"all layers": (self.flat.dim,)}
        return {name: each.shape for name, each in self.encoders.items()}

    def place_(self, rows: Tensor, name: str, own: Tensor) -> None:
        """Write, or where layers are projected together add, a layer's part into rows."""
        if self.flat:
            lead = own.shape[:-1]
            rows += self.flat.project_flat(name, own.flatten(0, -2)).view(*lead, -1)
            return
        start = 0
        for other, each in self.encoders.items():
            if other == name:
                rows[..., start : start + each.size] = own
                return
            start += each.size

    def pulled(self, rows: Tensor) -> dict[str, Tensor]:
        """Matrices by layer whose products with gradients are those of `rows` with theirs."""
        if self.flat:
            raise ValueError("a projection of all layers together cannot be taken back by layer")
        parts = rows.split([each.size for each in self.encoders.values()], 1)
        named = zip(self.encoders.items(), parts, strict=True)
        return {name: each.pulled(part) for (name, each), part in named}


def encoding(
    sites: Iterable[Site],
    projection: Projection | None = None,
    *,
    scope: str = "layer",
    whiten: Curvature | None = None,
    damping: float = 0.1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Encoding:
    """How gradients of these layers become rows.

    `projection`: sides larger than its `dim` become that small; with `scope` "global", all layers
    together. `whiten`: curvature that is folded in, each side damped by √damping of its mean
    eigenvalue, which is damping of the whole by factors.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}")
    if scope == "global" and projection is None:
        raise ValueError("scope='global' is a projection of all layers; give it a dimension p")
    if whiten is not None:
        for layer in whiten.layers.values():
            check_separable(layer.method)
    encoders = {}
    for site in sites:
        random = projection if scope == "layer" else None
        left, right = (random_side(random, site, side, dtype, device) for side in (0, 1))
        scale = None
        if whiten is not None:
            left, right, scale = whitened_sides(whiten, site.name, left, right, damping)
        encoders[site.name] = Encoder(site, left, right, scale)
    return Encoding(encoders, projection if scope == "global" else None)


def _projected(rows: Tensor, matrix: Tensor, bias: bool = False) -> Tensor:
    """XPᵀ, or [X, 1]Pᵀ with a bias. [B, N, S, d], [B, p, d] → [B, N, S, p]"""
    flat = rows.flatten(1, 2)  # one large product: a small one an example is slower
    if bias:
        found = torch.baddbmm(matrix[:, None, :, -1], flat, matrix[:, :, :-1].mT)
    else:
        found = flat @ matrix.mT
    return found.unflatten(1, rows.shape[1:3])
