"""Influence against its definition: gradients one example at a time, H as a matrix, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron.attribution.building import build_store as build
from isokron.attribution.encoding import encoding
from isokron.attribution.influence import encoded, gradients, preconditioned
from isokron.attribution.projection import Projection
from isokron.attribution.scoring import score_data, score_store
from isokron.attribution.sides import suggested_dim
from isokron.curvature import CrossEntropy, Curvature, fit
from isokron.curvature.packing import pack
from isokron.curvature.sites import find_sites
from isokron.tasks import Examples

METHODS = ["kfac", "ekfac", "tkfac", "shampoo"]
LOSS = CrossEntropy()


class Words(nn.Module):
    """Tokens [N, S] → logits [N, S, 9]: an embedding, a norm, layers with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.mix, self.head = nn.Linear(6, 8), nn.Linear(8, 9, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        x = x.cumsum(1)  # later positions see earlier ones
        return self.head(self.mix(x).tanh())


class Pictures(nn.Module):
    """[N, 2, 6, 6] → logits [N, 4]: a convolution in groups, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, stride=2, groups=2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).tanh().flatten(1))


def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Examples]:
    torch.manual_seed(0)
    if name == "words":
        tokens, targets = torch.randint(0, 9, (2, 14, 5))
        targets[2, 3:] = -100
        return Words().to(dtype), Examples((tokens, targets))
    pictures = torch.randn(14, 2, 6, 6).to(dtype)
    return Pictures().to(dtype), Examples((pictures, torch.randint(0, 4, (14,))))


def batches(examples: Examples, size: int = 4) -> list[Any]:
    numbers = torch.arange(len(examples)).split(size)
    return [examples.batch(each) for each in numbers]


def curvature(name: str, method: str, dtype: torch.dtype = torch.float32) -> Curvature:
    model, examples = case(name, dtype)
    return fit(model, batches(examples), LOSS, method, dtype=dtype)


def brute_force(name: str, method: str, damping: float, **options: Any) -> Tensor:
    """∇_qᵀ (H + λI)⁻¹ ∇_t of all pairs, summed over layers; H dense, gradients by autograd."""
    model, examples = case(name, torch.float64)
    found = curvature(name, method, torch.float64)
    params = dict(model.named_parameters())
    total = torch.zeros(len(examples), len(examples), dtype=torch.float64)
    each = []
    for batch in batches(examples, 1):
        terms, weights = LOSS(model, batch)
        grads = torch.autograd.grad((terms * weights).sum(), list(params.values()))
        each.append(dict(zip(params, grads, strict=True)))
    for layer in found:
        rows = torch.stack([pack(found.layers[layer].layout, one) for one in each])  # [N, B, o, i]
        dense = found[layer].to_dense()  # [B, oi, oi]
        mean = dense.diagonal(dim1=1, dim2=2).mean()
        eye = torch.eye(dense.size(1), dtype=torch.float64)
        inverse = torch.linalg.inv(dense + damping * mean * eye)
        flat = rows.flatten(2).movedim(1, 0)  # [B, N, oi]
        total += (flat @ inverse @ flat.mT).sum(0)
    return total


@pytest.mark.parametrize("name", ["words", "pictures"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stored", [False, True])
def test_scores_are_those_of_brute_force(
    name: str, method: str, stored: bool, tmp_path: Path
) -> None:
    model, examples = case(name)
    sites = find_sites(model)
    inverse = curvature(name, method).inverse(0.1, relative=True)
    asked, _ = gradients(model, batches(examples, 5), LOSS, sites)
    queries = preconditioned(inverse, asked)
    if stored:
        plain = encoding(sites)
        store = build(tmp_path / "store", model, examples, LOSS, plain, per_shard=5)
        found = score_store(store, encoded(plain, queries)).of
    else:
        found = score_data(model, batches(examples), LOSS, sites, queries).of
    right = brute_force(name, method, 0.1)
    off = torch.linalg.matrix_norm(found - right) / torch.linalg.matrix_norm(right)
    assert off < 2e-6


@pytest.mark.parametrize("name", ["words", "pictures"])
@pytest.mark.parametrize("method", ["kfac", "tkfac", "shampoo"])
def test_whitened_rows_have_the_influence_as_their_inner_product(
    name: str, method: str, tmp_path: Path
) -> None:
    model, examples = case(name)
    sites, found = find_sites(model), curvature(name, method)
    white = encoding(sites, whiten=found, damping=0.1)
    store = build(tmp_path / "store", model, examples, LOSS, white, per_shard=14)
    rows = store.rows(range(len(examples)))
    asked, _ = gradients(model, batches(examples), LOSS, sites)
    factored = found.inverse(0.1, relative=True, split="sides")
    queries = preconditioned(factored, asked)
    right = score_data(model, batches(examples), LOSS, sites, queries).of
    torch.testing.assert_close(rows @ rows.mT, right, rtol=1e-4, atol=1e-4 * float(right.max()))
    unit = score_store(store, rows, unit=True).of
    torch.testing.assert_close(unit.diagonal(), torch.ones(len(examples)))


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_rows_of_batches_are_projections_of_whole_gradients(whiten: bool, scope: str) -> None:
    model, examples = case("words")
    sites = find_sites(model)
    how = encoding(
        sites,
        Projection(5, seed=3),
        scope=scope,
        whiten=curvature("words", "kfac") if whiten else None,
    )
    rows: list[Tensor] = []
    from isokron.attribution.collect import collect

    collect(model, batches(examples), LOSS, how, lambda own, _: rows.append(own))
    whole, _ = gradients(model, batches(examples), LOSS, sites)
    torch.testing.assert_close(torch.cat(rows), encoded(how, whole), rtol=1e-4, atol=1e-5)


def test_projected_scores_are_right_on_average() -> None:
    model, examples = case("words")
    sites = find_sites(model)
    whole, _ = gradients(model, batches(examples), LOSS, sites)
    right = encoded(encoding(sites), whole)
    right = right @ right.mT
    for scope in ("layer", "global"):
        mean = torch.zeros_like(right)
        for seed in range(200):
            rows = encoded(encoding(sites, Projection(4, seed=seed), scope=scope), whole)
            mean += rows @ rows.mT / 200
        assert torch.linalg.matrix_norm(mean - right) < 0.15 * torch.linalg.matrix_norm(right)


def test_rows_by_token_add_up_to_those_by_example(tmp_path: Path) -> None:
    model, examples = case("words")
    sites = find_sites(model)
    how = encoding(sites, Projection(4))
    whole = build(tmp_path / "whole", model, examples, LOSS, how)
    parts = build(tmp_path / "parts", model, examples, LOSS, how, tokens=True, per_shard=4)
    total = torch.zeros(len(examples), how.width)
    total.index_add_(0, parts.example, parts.rows(range(len(parts))))
    torch.testing.assert_close(total, whole.rows(range(len(examples))), rtol=1e-4, atol=1e-5)
    asked, _ = gradients(model, batches(examples, 2)[:1], LOSS, sites)
    by_token = score_data(
        model, [examples.batch(torch.arange(14))], LOSS, sites, asked, tokens=True
    )
    by_example = score_data(model, batches(examples), LOSS, sites, asked)
    torch.testing.assert_close(by_token.of.sum(2), by_example.of, rtol=1e-4, atol=1e-4)


def test_scores_by_layer_add_up(tmp_path: Path) -> None:
    model, examples = case("words")
    sites = find_sites(model)
    how = encoding(sites)
    asked, _ = gradients(model, batches(examples, 2)[:1], LOSS, sites)
    store = build(tmp_path / "store", model, examples, LOSS, how)
    rows = encoded(how, asked)
    found = score_store(store, rows, by_layer=True, memory=4 * how.width * 3)
    assert found.layers == tuple(site.name for site in sites)
    right = score_store(store, rows).of
    torch.testing.assert_close(found.of.sum(1), right)
    fly = score_data(model, batches(examples), LOSS, sites, asked, by_layer=True)
    torch.testing.assert_close(fly.of, found.of, rtol=1e-4, atol=1e-4)


def test_ekfac_cannot_be_whitened() -> None:
    model, _ = case("words")
    with pytest.raises(ValueError, match="belong to neither; fit method 'kfac'"):
        encoding(find_sites(model), whiten=curvature("words", "ekfac"))


def test_an_example_without_a_finite_loss_is_named(tmp_path: Path) -> None:
    model, examples = case("pictures")
    examples.tensors[0][6] = float("nan")
    ids = [f"picture {number}" for number in range(14)]
    with pytest.raises(FloatingPointError, match="example 'picture 6' has a loss of nan"):
        build(tmp_path, model, examples, LOSS, encoding(find_sites(model)), ids=ids)


def test_the_suggested_dimension_fills_a_row_and_no_more() -> None:
    sites = find_sites(nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 500)))
    assert suggested_dim(sites, 1000) == 128
    assert encoding(sites, Projection(128)).width <= 2**16 < encoding(sites, Projection(256)).width
    assert suggested_dim(sites, 2**20) == 16
    assert suggested_dim(sites, 2**40) == 8
    assert suggested_dim(find_sites(nn.Linear(200, 300)), 1000) is None
