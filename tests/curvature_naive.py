"""Curvature of tiny layers from its definition: plain autograd, example by example, in float64."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature import CrossEntropy

CLASSES = 3


class Tailed(nn.Module):
    """A layer, and what mixes all that an example has of its outputs into scores of classes.

    The mixing has no parameters, so that `layer` is all there is to observe.
    """

    def __init__(self, layer: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.layer(x))

    def tail(self, y: Tensor) -> Tensor:
        flat = torch.tanh(self.scale * y).flatten(1)
        mix = torch.randn(flat.size(1), CLASSES, generator=torch.Generator().manual_seed(1))
        return flat @ mix.to(flat.dtype)


@dataclass
class Truth:
    """inputs: [B, N, S, i], the one of a bias included; grads: [B, N, S, o]; examples: gradients of
    examples, [B, N, o, i]; terms: M."""

    inputs: Tensor
    grads: Tensor
    examples: Tensor
    terms: int

    @property
    def fisher(self) -> Tensor:
        """F = (1/M) Σ_n vec(∇_n) vec(∇_n)ᵀ. [B, oi, oi]"""
        flat = self.examples.flatten(2)
        return flat.mT @ flat / self.terms

    @property
    def kfac(self) -> tuple[Tensor, Tensor]:
        """G and A, expand."""
        g, a = self.grads.flatten(1, 2), self.inputs.flatten(1, 2)
        return g.mT @ g / self.terms, a.mT @ a / a.size(1)

    @property
    def reduced(self) -> tuple[Tensor, Tensor]:
        """G and A, reduce."""
        g, a = self.grads.sum(2), self.inputs.mean(2)
        return g.mT @ g / self.terms, a.mT @ a / a.size(1)

    @property
    def tkfac(self) -> tuple[Tensor, Tensor]:
        g, a = self.grads.flatten(1, 2), self.inputs.flatten(1, 2)
        left = (g * a.square().sum(2, keepdim=True)).mT @ g / self.terms
        right = (a * g.square().sum(2, keepdim=True)).mT @ a / self.terms
        return left, right

    @property
    def shampoo(self) -> tuple[Tensor, Tensor]:
        """L = Σ ∇∇ᵀ/M, R = Σ ∇ᵀ∇/M."""
        each = self.examples
        return (each @ each.mT).sum(1) / self.terms, (each.mT @ each).sum(1) / self.terms


def as_matrix(layer: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Something shaped as a layer's parameters, as [B, o, i]."""
    if isinstance(layer, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
        return torch.stack([p.flatten() for p in (weight, bias) if p is not None])[None]
    assert weight is not None
    if isinstance(layer, nn.Embedding) or type(layer).__name__ == "Conv1D":
        matrix = weight.T[None]
    else:
        groups = getattr(layer, "groups", 1)
        matrix = weight.reshape(groups, weight.size(0) // groups, -1)
    if bias is None:
        return matrix
    return torch.cat([matrix, bias.reshape(matrix.size(0), matrix.size(1), 1)], 2)


def places(layer: nn.Module, y: Tensor) -> Tensor:
    """Outputs of a layer as [B, N, S, o]."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        y = y.flatten(2).mT
        return torch.stack(y.chunk(layer.groups, 2))
    return y.reshape(1, y.size(0), -1, y.size(-1))


def gradient(layer: nn.Module, value: Tensor) -> Tensor:
    """Of a number, with respect to the layer's parameters: [B, o, i]."""
    params = [p for p in (layer.weight, getattr(layer, "bias", None)) if p is not None]
    found = torch.autograd.grad(value, params, retain_graph=True)
    return as_matrix(layer, found[0], found[1] if len(found) > 1 else None)


def truth(model: Tailed, x: Tensor, targets: Tensor) -> Truth:
    """What the layer of a model shows for cross-entropy of the data's labels.

    The input of a position is read off the layer itself: ā is row o of ∂y_o/∂W.
    """
    layer, rows, grads, examples = model.layer, [], [], []
    for n in range(len(x)):
        y = layer(x[n : n + 1])
        loss = nn.functional.cross_entropy(model.tail(y), targets[n : n + 1])
        examples.append(gradient(layer, loss))
        grads.append(places(layer, torch.autograd.grad(loss, y, retain_graph=True)[0]))
        seen = places(layer, y)  # [B, 1, S, o]
        rows.append(
            torch.stack(
                [
                    torch.stack([gradient(layer, spot[0])[b, 0] for spot in block[0]])
                    for b, block in enumerate(seen)
                ]
            )[:, None]
        )
    return Truth(torch.cat(rows, 1), torch.cat(grads, 1), torch.stack(examples, 1), len(x))


def batched(*tensors: Tensor, sizes: Iterable[int] = (2, 1)) -> list[Any]:
    """Data in batches of these sizes, the last of them again until nothing is left."""
    sizes, batches, start = list(sizes), [], 0
    while start < len(tensors[0]):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        batches.append(tuple(t[start : start + size] for t in tensors))
        start += size
    return batches


def labels(count: int) -> Tensor:
    return torch.arange(count) % CLASSES


def kron(left: Tensor, right: Tensor) -> Tensor:
    """[B, o, o] ⊗ [B, i, i]"""
    return torch.stack(
        [torch.kron(a.contiguous(), b.contiguous()) for a, b in zip(left, right, strict=True)]
    )


CROSS_ENTROPY = CrossEntropy()
EXACT = {"rtol": 0.0, "atol": 1e-12}
