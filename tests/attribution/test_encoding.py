"""Rows of gradients against gradients by autograd and H as a matrix, in float64."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron.attribution.projection import (
    Encoding,
    Projection,
    choose_dim,
    collect,
    encoding,
    row_width,
)
from isokron.curvature import CrossEntropy, Curvature, fit
from isokron.curvature.layers import Layer, find_layers, pack

LOSS = CrossEntropy()
METHODS = ["kfac", "tkfac", "shampoo"]
DAMPING = 0.1


class Words(nn.Module):
    """Vectors [N, S, 6] → logits [N, S, 9]: a norm, layers with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mix, self.head = nn.Linear(6, 8), nn.Linear(8, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).cumsum(1)  # later positions see earlier ones
        return self.head(self.mix(x).tanh())


class Pictures(nn.Module):
    """[N, 2, 6, 6] → logits [N, 4]: convolutions in groups, with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, groups=2)
        self.other = nn.Conv2d(4, 6, 1, groups=2, bias=False)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.conv(x).tanh()).flatten(1))


def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[Any]]:
    """A model, and batches of 4 examples."""
    torch.manual_seed(0)
    if name == "words":
        targets = torch.randint(0, 9, (12, 5))
        targets[2, 3:] = -100
        model, x = Words().to(dtype), torch.randn(12, 5, 6).to(dtype)
    else:
        model, x, targets = Pictures().to(dtype), torch.randn(12, 2, 6, 6).to(dtype), None
        targets = torch.randint(0, 4, (12,))
    return model, list(zip(x.split(4), targets.split(4), strict=True))


def exact_gradients(model: nn.Module, batches: list[Any]) -> list[dict[str, Tensor]]:
    """By autograd, one example at a time, by parameter."""
    params = dict(model.named_parameters())
    gradients = []
    for batch in batches:
        for number in range(len(batch[0])):
            terms, weights = LOSS(model, tuple(part[number : number + 1] for part in batch))
            grads = torch.autograd.grad((terms * weights).sum(), list(params.values()))
            gradients.append(dict(zip(params, grads, strict=True)))
    return gradients


def by_layer(layers: list[Layer], gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """[N, B, o, i]"""
    return {
        layer.name: torch.stack([pack(layer.layout, one) for one in gradients]) for layer in layers
    }


def rows_of(
    model: nn.Module, batches: list[Any], how: Encoding, dtype: torch.dtype = torch.float32
) -> Tensor:
    parts: list[Tensor] = []
    collect(model, batches, LOSS, how, lambda rows, losses: parts.append(rows), dtype=dtype)
    return torch.cat(parts)


def dense_products(
    layers: list[Layer], gradients: dict[str, Tensor], curvature: Curvature
) -> dict[str, Tensor]:
    """⟨∇_q, H⁻¹∇_t⟩ by layer [N, N], H = (G + √λ/π) ⊗ (A + π√λ), or Λ + λ of a norm."""
    products = {}
    for layer in layers:
        operator, flat = curvature[layer.name], gradients[layer.name].flatten(2)  # [N, B, oi]
        if layer.kind == "diagonal":
            values = operator.eigenvalues.flatten()
            inverse = torch.diag(1 / (values + DAMPING * values.mean()))[None]
        else:
            left, right = (factor.to_dense() for factor in operator.factors)
            means = [side.diagonal(dim1=1, dim2=2).mean(1) for side in (left, right)]
            root = (DAMPING * (means[0] * means[1]).mean()).sqrt()
            pi = (means[1] / means[0]).sqrt()
            eyes = [torch.eye(side.size(1), dtype=torch.float64) for side in (left, right)]
            left = left + (root / pi)[:, None, None] * eyes[0]
            right = right + (root * pi)[:, None, None] * eyes[1]
            pairs = zip(left, right, strict=True)
            inverse = torch.stack([torch.linalg.inv(torch.kron(g, a)) for g, a in pairs])
        products[layer.name] = torch.einsum("qbx,bxy,tby->qt", flat, inverse, flat)
    return products


@pytest.mark.parametrize("name", ["words", "pictures"])
@pytest.mark.parametrize("dim", [None, 3])
def test_rows_are_projected_gradients_of_examples(name: str, dim: int | None) -> None:
    model, batches = case(name, torch.float64)
    layers = find_layers(model).layers
    projection = None if dim is None else Projection(dim, seed=1)
    how = encoding(layers, projection, dtype=torch.float64)
    rows = rows_of(model, batches, how, torch.float64)
    exact = by_layer(layers, exact_gradients(model, batches))
    for layer in layers:
        expected = exact[layer.name]
        if projection is not None:
            sizes = layer.shape[1:]
            left, right = (
                projection.matrix(layer.name, side, size, torch.float64)
                for side, size in zip(("output", "input"), sizes, strict=True)
            )
            if layer.kind != "diagonal":
                expected = left @ expected if sizes[0] > projection.dim else expected
            expected = expected @ right.mT if sizes[1] > projection.dim else expected
        part = how.split(rows)[layer.name]
        torch.testing.assert_close(part, expected.flatten(1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(how.matrices(exact), rows, rtol=1e-9, atol=1e-12)
    assert (
        rows.size(1)
        == how.width
        == (row_width(layers, dim) if dim else sum(x.parameters for x in layers))
    )


@pytest.mark.parametrize("name", ["words", "pictures"])
@pytest.mark.parametrize("method", METHODS)
def test_products_of_complete_whitened_rows_are_those_with_the_inverse(
    name: str, method: str
) -> None:
    model, batches = case(name, torch.float64)
    layers = find_layers(model).layers
    curvature = fit(model, batches, LOSS, method, dtype=torch.float64)
    how = encoding(layers, whiten=curvature, damping=DAMPING, dtype=torch.float64)
    parts = how.split(rows_of(model, batches, how, torch.float64))
    exact = dense_products(layers, by_layer(layers, exact_gradients(model, batches)), curvature)
    for layer, part in parts.items():
        torch.testing.assert_close(part @ part.mT, exact[layer], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["words", "pictures"])
@pytest.mark.parametrize("kind", ["rademacher", "normal"])
def test_products_of_projected_whitened_rows_are_unbiased(name: str, kind: str) -> None:
    model, batches = case(name, torch.float64)
    layers = find_layers(model).layers
    curvature = fit(model, batches, LOSS, dtype=torch.float64)
    gradients = by_layer(layers, exact_gradients(model, batches))
    exact = sum(dense_products(layers, gradients, curvature).values())
    estimates = []
    for seed in range(200):
        projection = Projection(3, kind, seed)
        how = encoding(layers, projection, whiten=curvature, damping=DAMPING, dtype=torch.float64)
        rows = how.matrices(gradients)
        estimates.append(rows @ rows.mT)
    estimate = torch.stack(estimates)
    error = estimate.std(0) / len(estimates) ** 0.5
    # 144 pairs, of which half differ: beyond 4 standard errors once in some hundred draws of seeds
    assert bool(((estimate.mean(0) - exact).abs() < 4 * error).all())
    assert bool((error < 0.2 * exact.diagonal().mean()).all())


def test_a_rotation_is_all_that_differs_from_the_symmetric_root() -> None:
    model, batches = case("words", torch.float64)
    layer = find_layers(model, "mix").layers[0]
    curvature = fit(model, batches, LOSS, layers="mix", dtype=torch.float64)
    left = encoding([layer], whiten=curvature, dtype=torch.float64).encoders["mix"].left[0]
    values, basis = torch.linalg.eigh(left.mT @ left)
    rotation = left @ ((basis * values**-0.5) @ basis.mT)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(8, dtype=torch.float64))


@pytest.mark.parametrize("dim", [None, 3])
def test_pulled_rows_have_the_same_products_with_gradients(dim: int | None) -> None:
    model, batches = case("words", torch.float64)
    layers = find_layers(model).layers
    curvature = fit(model, batches, LOSS, dtype=torch.float64)
    projection = None if dim is None else Projection(dim)
    how = encoding(layers, projection, whiten=curvature, dtype=torch.float64)
    gradients = by_layer(layers, exact_gradients(model, batches))
    rows = how.matrices(gradients)
    pulled = how.pulled(rows)
    products = sum(pulled[name].flatten(1) @ gradients[name].flatten(1).mT for name in pulled)
    torch.testing.assert_close(products, rows @ rows.mT)


def test_rows_of_a_bfloat16_model_are_float32() -> None:
    model, batches = case("words", torch.bfloat16)
    layers = find_layers(model).layers
    rows = rows_of(model, batches, encoding(layers, Projection(4)))
    wide, precise = case("words")
    exact = rows_of(wide, precise, encoding(find_layers(wide).layers, Projection(4)))
    assert rows.dtype == torch.float32
    assert float((rows - exact).norm() / exact.norm()) < 0.05
    assert not rows.equal(rows.bfloat16().float())


def test_rows_of_weighted_terms_are_gradients_of_the_weighted_loss() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(5, 4).double(), torch.randint(0, 3, (5,))
    weights = torch.tensor([1.0, 0.25, 0.5, 0.0, 2.0]).double()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch[2]

    how = encoding(find_layers(model).layers, dtype=torch.float64)
    parts: list[Tensor] = []
    batch = (x, y, weights)
    collect(model, [batch], loss, how, lambda rows, _: parts.append(rows), dtype=torch.float64)
    residual = model(x).softmax(1) - nn.functional.one_hot(y, 3)
    inputs = torch.cat([x, torch.ones(5, 1).double()], 1)
    expected = weights[:, None, None] * residual[:, :, None] * inputs[:, None]
    torch.testing.assert_close(parts[0], expected.flatten(1).detach())


class Gated(nn.Module):
    """The second layer is multiplied by 0: its gradients are. [N, 4] → [N, 3]"""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.dead = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.live(x) + 0 * self.dead(x)


@pytest.mark.parametrize("dim", [None, 2])
def test_a_layer_without_gradients_has_zeros_and_no_nan(dim: int | None) -> None:
    torch.manual_seed(0)
    model = Gated()
    batches = [(torch.randn(6, 4), torch.randint(0, 3, (6,)))]
    curvature = fit(model, batches, LOSS)
    assert float(curvature["dead"].factors[0].to_dense().abs().max()) == 0
    projection = None if dim is None else Projection(dim)
    how = encoding(find_layers(model).layers, projection, whiten=curvature)
    parts = how.split(rows_of(model, batches, how))
    assert float(parts["dead"].abs().max()) == 0
    assert bool(parts["live"].isfinite().all())
    assert float(parts["live"].abs().max()) > 0


def test_a_dead_group_or_entry_has_zeros_and_the_others_have_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 1, groups=2), nn.LayerNorm([4, 1]), nn.Flatten())
    x = torch.randn(6, 2, 1)
    x[:, 1] = 0  # inputs of the second group, whose bias is left out
    model[0].bias = None
    model[1].weight.data[:] = torch.tensor([1.0, 1, 0, 0])[:, None]  # and its gradients
    batches = [(x, torch.randint(0, 4, (6,)))]
    curvature = fit(model, batches, LOSS)
    how = encoding(find_layers(model).layers, whiten=curvature)
    rows = rows_of(model, batches, how)
    blocks = how.split(rows)["0"].unflatten(1, (2, -1))
    assert bool(rows.isfinite().all())
    assert float(blocks[:, 1].abs().max()) == 0
    assert float(blocks[:, 0].abs().min()) > 0


def test_a_batch_without_a_loss_has_zeros() -> None:
    model, batches = case("words")
    empty = batches[1][0], torch.full_like(batches[1][1], -100)
    how = encoding(find_layers(model).layers, Projection(4))
    rows = rows_of(model, [batches[0], empty, batches[2]], how)
    expected = rows_of(model, batches, how)
    assert rows[4:8].equal(torch.zeros_like(rows[4:8]))
    torch.testing.assert_close(rows[:4], expected[:4])
    torch.testing.assert_close(rows[8:], expected[8:])


class Experts(nn.Module):
    """The sign of the first input says which of two layers a batch goes through. [N, 4] → [N, 3]"""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0] > 0)](x)


def test_a_layer_that_a_batch_does_not_use_has_zeros() -> None:
    model = Experts()
    x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
    x[:, 0] = torch.tensor([1.0, 1, -1, -1])
    how = encoding(find_layers(model).layers)
    parts = how.split(rows_of(model, [(x[:2], y[:2]), (x[2:], y[2:])], how))
    assert float(parts["experts.0"][:2].abs().max()) == 0
    assert float(parts["experts.1"][2:].abs().max()) == 0
    assert float(parts["experts.0"][2:].abs().min(1).values.max()) > 0


def test_what_cannot_be_whitened_or_projected_is_refused() -> None:
    model, batches = case("words")
    layers = find_layers(model).layers
    with pytest.raises(ValueError, match=r"'mix' cannot be whitened: eigenvalues .* score exactly"):
        encoding(layers[1:], whiten=fit(model, batches, LOSS, "ekfac"))
    thin = fit(model, batches, LOSS, policy="all")
    with pytest.raises(ValueError, match=r"a side of low rank .* score exactly"):
        encoding(layers, whiten=thin)
    with pytest.raises(ValueError, match=r"layer '0' is an embedding, .* score exactly"):
        encoding(find_layers(nn.Sequential(nn.Embedding(5, 3)), "0").layers)


def test_the_smallest_dimension_that_is_good_enough_and_fits_is_chosen() -> None:
    layers = find_layers(
        nn.Sequential(nn.Linear(300, 400), nn.LayerNorm(400), nn.Linear(400, 500))
    ).layers
    quality = {16: 0.5, 32: 0.8, 64: 0.92, 128: 0.97, 256: 0.99, 512: 1.0}
    measured: list[int] = []

    def measure(dim: int) -> float:
        measured.append(dim)
        return quality[dim]

    everything = 10 * sum(layer.parameters for layer in layers) * 4
    assert choose_dim(layers, 10, everything, measure) == (64, 0.92)
    assert measured == [16, 32, 64]
    assert choose_dim(layers, 10, everything, measure, least=0.95) == (128, 0.97)
    fits = 10 * row_width(layers, 32) * 4
    assert choose_dim(layers, 10, fits, measure) == (None, 1.0)
    assert choose_dim(layers, 10, fits, measure, least=0.8) == (32, 0.8)
    assert choose_dim(layers, 10, fits // 2, measure, least=0.8, itemsize=2) == (32, 0.8)
    assert choose_dim(layers, 10, 100, measure) == (None, 1.0)
    assert choose_dim(layers, 10, everything, lambda dim: 0.0) == (None, 1.0)


SECOND_DEVICE = """
import sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/attribution"]
import second_device
from test_encoding import LOSS, case, find_layers, fit, rows_of
from isokron.attribution.projection import Projection, encoding

for name in ("words", "pictures"):
    for kind in ("rademacher", "normal"):
        model, batches = case(name)
        curvature = fit(model, batches, LOSS)
        def rows(model, batches):
            how = encoding(find_layers(model).layers, Projection(3, kind), whiten=curvature)
            return rows_of(model, batches, how)
        here = rows(model, batches)
        there = rows(model.to("npu"), [tuple(part.to("npu") for part in b) for b in batches])
        assert there.device.type == "npu"
        torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-6)
print("passed")
"""


def test_rows_on_a_second_device_are_those_of_the_cpu() -> None:
    folder = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SECOND_DEVICE, str(folder)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "passed\n", done.stderr
