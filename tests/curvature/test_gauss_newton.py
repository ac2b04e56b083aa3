"""Gauss–Newton products against Σ JᵀHJ made of Jacobians and Hessians, in float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from isokron.curvature import find_layers
from isokron.curvature.gauss_newton import GaussNewton
from isokron.curvature.layers import Layer, pack
from isokron.curvature.losses import BinaryCrossEntropy, CrossEntropy, SquaredError


class Tied(nn.Module):
    """Tokens → logits by one table at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.table(tokens)).tanh().cumsum(1))


class Twice(nn.Module):
    """One linear layer that is used twice, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(self.mix(x).tanh()).tanh()))


class Attention(nn.Module):
    """Packed projections, of which the rows of the values are left out below."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 2, groups=2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).tanh().flatten(1))


class Normed(nn.Module):
    """A GroupNorm, which torch cannot differentiate forward where inputs are channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return self.head(self.norm(self.conv(x)).tanh().flatten(1))


@dataclass(frozen=True)
class Poisson:
    """A likelihood of one's own: exp(y) − t·y summed over outputs, whose Hessian is diag(exp y)."""

    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), batch[1]

    def weights(self, targets: Tensor) -> Tensor:
        return torch.ones(targets.shape[:-1])

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.exp() - targets * outputs).sum(-1)

    def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(outputs.exp(), generator)

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        for c in range(outputs.size(-1)):
            root = torch.zeros_like(outputs)
            root[..., c] = (outputs[..., c] / 2).exp()
            yield root


def case(name: str) -> tuple[nn.Module, Any, Any, list[Layer]]:
    """Model, loss, batch of 6 examples and layers."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    labels, loss, pattern = torch.randint(0, 3, (6,)), CrossEntropy(), "*"
    if name == "tied":
        model: nn.Module = Tied()
        tokens, labels = torch.randint(0, 5, (2, 6, 3))
        labels[1, 2] = labels[4, 0] = -100
        x, pattern = tokens, "mix,head"
    elif name == "attention":
        model, x = Attention(), torch.randn(6, 3, 4, dtype=torch.float64)
        labels, pattern = torch.randint(0, 3, (6, 3)), "*,!attention.v"
    elif name == "convolution":
        model, x = Convolution(), torch.randn(6, 2, 3, 3, dtype=torch.float64)
    elif name == "normed":
        model, x = Normed(), torch.randn(6, 2, 3, 3, dtype=torch.float64)
    else:
        model = Twice()
        targets = torch.rand(6, 3, dtype=torch.float64)
        losses = {"squared": SquaredError(), "binary": BinaryCrossEntropy(), "poisson": Poisson()}
        loss, labels = losses.get(name, loss), targets if name in losses else labels
    return model.double(), loss, (x, labels), find_layers(model, pattern).layers


def dense(model: nn.Module, loss: Any, batch: Any, layers: list[Layer]) -> Tensor:
    """Σ w JᵀHJ / Σ w on the matrices of all layers, one after another, row by row."""
    sizes = [layer.parameters for layer in layers]

    def outputs(shift: Tensor) -> Tensor:
        weights: dict[str, Tensor] = {}
        for layer, part in zip(layers, shift.split(sizes), strict=True):
            for key, value in _unpacked(layer, part.view(layer.shape)).items():
                path, rows = _place(layer, key)
                old = weights.get(path, model.get_parameter(path))
                sides = [0, 0] * (old.ndim - 1) + [rows[0], len(old) - rows[1]] if rows else [0, 0]
                weights[path] = old + nn.functional.pad(value.reshape(-1, *old.shape[1:]), sides)
        return functional_call(model, weights, (batch[0],))

    jacobian = torch.autograd.functional.jacobian(outputs, torch.zeros(sum(sizes)).double())
    fixed, targets = loss.forward(model, batch)
    weights = loss.weights(targets).double()
    flat, rows = fixed.detach().flatten(0, -2), jacobian.flatten(0, -3)
    targets = targets.clamp_min(0).reshape(len(flat), *targets.shape[fixed.ndim - 1 :])
    total = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64)
    for y, t, w, j in zip(flat, targets, weights.flatten(), rows, strict=True):
        term = partial(_term, loss, t)
        total += w * j.mT @ torch.autograd.functional.hessian(term, y) @ j
    return total / weights.sum()


def _term(loss: Any, target: Tensor, output: Tensor) -> Tensor:
    return loss.terms(output[None], target[None]).sum()


def _unpacked(layer: Layer, matrix: Tensor) -> dict[str, Tensor]:
    """By hand: a norm has rows for weight and bias, other layers have the bias as last column."""
    if layer.kind == "diagonal":
        return dict(zip(layer.layout.params, matrix[0], strict=True))
    if not layer.layout.bias:
        return {"weight": matrix.flatten(0, 1)}
    return {"weight": matrix[..., :-1].flatten(0, 1), "bias": matrix[..., -1].flatten()}


def _place(layer: Layer, key: str) -> tuple[str, tuple[int, int] | None]:
    """The path of a parameter, and the layer's rows of it."""
    if layer.name in ("attention.q", "attention.k"):
        first = 4 * (layer.name == "attention.k")
        return f"attention.in_proj_{key}", (first, first + 4)
    return f"{layer.name}.{key}", None


CASES = ["tied", "twice", "attention", "convolution", "normed", "squared", "binary", "poisson"]


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_dense_matrix(name: str) -> None:
    model, loss, batch, layers = case(name)
    matrix = dense(model, loss, batch, layers)
    vectors = torch.randn(2, len(matrix), dtype=torch.float64)
    right = vectors @ matrix
    sizes = [layer.parameters for layer in layers]
    parts = {
        layer.name: part.view(2, *layer.shape).movedim(0, 1)
        for layer, part in zip(layers, vectors.split(sizes, 1), strict=True)
    }
    # in two batches, as over a data set
    batches = [tuple(x[:4] for x in batch), tuple(x[4:] for x in batch)]
    images = GaussNewton(model, layers, loss, batches).product(parts)
    flat = torch.cat([images[layer.name].movedim(1, 0).flatten(1) for layer in layers], 1)
    assert torch.allclose(flat, right, rtol=1e-9, atol=1e-11)


def test_the_model_is_left_as_it_was() -> None:
    model, loss, batch, layers = case("tied")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    vectors = {layer.name: torch.ones(1, 1, *layer.shape[1:]).double() for layer in layers}
    GaussNewton(model, layers, loss, [batch]).product(vectors)
    assert model.training
    assert model.head.weight is model.table.weight
    assert all(param.requires_grad and param.grad is None for param in model.parameters())
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_a_batch_without_terms_adds_nothing() -> None:
    model, loss, (tokens, labels), layers = case("tied")
    vectors = {layer.name: torch.ones(1, 1, *layer.shape[1:]).double() for layer in layers}
    ignored = (tokens, torch.full_like(labels, -100))
    alone = GaussNewton(model, layers, loss, [(tokens, labels)]).product(vectors)
    both = GaussNewton(model, layers, loss, [ignored, (tokens, labels)]).product(vectors)
    assert all(both[name].equal(alone[name]) for name in alone)


class Doubled(torch.autograd.Function):
    """Twice the input, with a backward pass only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Opaque(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(super().forward(x))


def test_an_operation_without_forward_derivatives_is_refused() -> None:
    model = nn.Sequential(Opaque(4, 3)).double()
    _, loss, batch, _ = case("twice")
    layers = find_layers(model).layers
    vectors = {"0": torch.ones(1, 1, 3, 5).double()}
    with pytest.raises(ValueError, match="score without refine"):
        GaussNewton(model, layers, loss, [batch]).product(vectors)


def test_g_is_symmetric_and_packs_as_gradients_do() -> None:
    """⟨u, Gv⟩ = ⟨v, Gu⟩, where u is a gradient packed by the layout of its layer."""
    model, loss, batch, layers = case("twice")
    grads = torch.autograd.grad(loss(model, batch)[0].sum(), list(model.parameters()))
    named = dict(zip(dict(model.named_parameters()), grads, strict=True))
    u = {layer.name: pack(layer.layout, named)[:, None] for layer in layers}
    v = {name: torch.randn_like(value) for name, value in u.items()}
    exact = GaussNewton(model, layers, loss, [batch])
    left, right = exact.product(v), exact.product(u)
    one = sum(float((u[name] * left[name]).sum()) for name in u)
    other = sum(float((v[name] * right[name]).sum()) for name in u)
    assert one == pytest.approx(other, rel=1e-10)
