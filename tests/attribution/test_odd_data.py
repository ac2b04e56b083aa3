"""Weights, NaN, empty batches, ignored targets, single examples and dead layers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron import Attributor, losses
from isokron.attribution import Query
from isokron.tasks import Shown

Pairs = list[tuple[Tensor, Tensor]]


def network(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    parts = [part for layer in layers for part in (layer, nn.Tanh())]
    return nn.Sequential(*parts[:-1])


def pairs(count: int = 6, features: int = 4) -> Pairs:
    torch.manual_seed(1)
    return list(zip(torch.randn(count, features), torch.arange(count) % 3, strict=True))


def begun(folder: Path, data: Any, **options: Any) -> Attributor:
    options = {"loss": losses.CrossEntropy(), **options}
    return Attributor(folder, network(4, 5, 3), data, **options)


def values(scores: Tensor) -> Tensor:
    return scores.as_subclass(Tensor)


def weighted(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    x, y, weights = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none"), weights


def test_fractional_weights_multiply_gradients(tmp_path: Path) -> None:
    weights = torch.tensor([0.25, 1.0, 0.0, 3.5, 0.5, 2.0])
    data = [(x, y, w) for (x, y), w in zip(pairs(), weights, strict=True)]
    a = begun(tmp_path, data, loss=weighted)
    model, rows = a.subject.model, []
    for x, y, w in data:
        loss = w * nn.functional.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    right = torch.stack(rows) @ torch.stack(rows).mT
    asked = [0, 1, 3, 4, 5]
    scores = values(a.score([data[number] for number in asked]))
    torch.testing.assert_close(scores, right[asked], rtol=1e-4, atol=1e-5)
    cosines = values(a.fit().score([data[0]], unit=True, save=False))
    torch.testing.assert_close(cosines[0, 0], torch.tensor(1.0), rtol=1e-3, atol=0)
    assert cosines[0, 2] == 0  # of weight 0


def test_data_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    data = pairs()
    data[4] = (torch.full((4,), float("nan")), torch.tensor(0))
    ids = [f"row {number}" for number in range(6)]
    a = begun(tmp_path / "fit", data, ids=ids)
    with pytest.raises(FloatingPointError, match=r"layer '0': .* not finite; look for NaN"):
        a.fit()
    plain = begun(tmp_path / "plain", data, ids=ids)
    with pytest.raises(FloatingPointError, match=r"example 'row 4' for query 'query 0'"):
        plain.score(data[:1])
    with pytest.raises(FloatingPointError, match=r"example 'row 4' has a loss of nan"):
        plain.build(dim=2)
    with pytest.raises(FloatingPointError, match=r"query 'query 0'.* nan"):
        begun(tmp_path / "query", pairs()).score([data[4]])


def test_a_query_without_examples_is_refused(tmp_path: Path) -> None:
    a = begun(tmp_path, pairs()).fit()
    empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"query 'nothing' has no loss term"):
        a.score([Query(empty, (Shown(),), "nothing")])
    with pytest.raises(ValueError, match="queries must hold at least one example"):
        a.score([])


def documents() -> Pairs:
    """Tokens [4] with targets; those of the second document are all ignored."""
    torch.manual_seed(2)
    rows = torch.randint(6, (5, 5))
    data = [(row[:-1], row[1:].clone()) for row in rows]
    data[1][1].fill_(-100)
    return data


@pytest.mark.parametrize("store", [False, True])
def test_a_document_whose_targets_are_all_ignored_has_no_influence(
    store: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
    data, loss = documents(), losses.CrossEntropy()
    a = Attributor(tmp_path, model, data, loss=loss, batch_size=1).fit()
    a = a.build(dim=100) if store else a
    for unit in (False, True):
        scores = values(a.score([data[0], data[2]], unit=unit))
        assert bool(scores.isfinite().all())
        assert bool((scores[:, 1] == 0).all())
        assert bool((scores[:, 0] != 0).all())
    assert float(a.self_influence()[1]) == 0.0
    with pytest.raises(ValueError, match=r"has no loss term|at least one loss term"):
        a.score([data[1]])
    with pytest.raises(ValueError, match=r"query 'query 1' has no loss term"):
        a.score(data[:2])
    assert a.report().exists()


def test_two_examples_of_one_name_are_refused(tmp_path: Path) -> None:
    data = [(torch.randn(4), torch.tensor(0)) for _ in range(3)]
    with pytest.raises(ValueError, match="ids must differ"):
        Attributor(tmp_path, nn.Linear(4, 3), data, loss=losses.CrossEntropy(), ids=["a", "b", "a"])


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac", "shampoo"])
def test_one_training_example_is_enough(method: str, tmp_path: Path) -> None:
    a = begun(tmp_path, pairs(1)).fit(method)
    scores = a.score(pairs(2), verify=True)
    assert scores.shape == (2, 1)
    cosine = a.score(pairs(1), unit=True, save=False)
    assert float(cosine[0, 0]) == pytest.approx(1.0, abs=1e-3)
    a.build(dim=100)
    torch.testing.assert_close(values(a.score(pairs(2))), values(scores), rtol=1e-3, atol=1e-3)
    assert a.report().exists()


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_a_query_that_no_layer_has_a_gradient_for_has_scores_of_zero(
    method: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))
    data = [(x.abs(), y) for x, y in pairs()]
    dead = torch.zeros(4), torch.tensor(1)  # inputs of both layers are 0
    a = Attributor(tmp_path, model, data, loss=losses.CrossEntropy()).fit(method)
    for unit in (False, True):
        scores = a.score([dead, data[0]], unit=unit, by_layer=True, verify=True)
        assert not values(scores)[0].any()
        assert values(scores)[1].any()
    assert a.report().exists()


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac"])
def test_a_layer_that_is_dead_on_all_data_adds_nothing(method: str, tmp_path: Path) -> None:
    model = network(4, 5, 3)
    dead = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    nn.init.constant_(dead.get_parameter("0.bias"), -1e6)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.dead = model, dead

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x) + self.dead(x)

    right = begun(tmp_path / "right", pairs()).fit(method).score(pairs(2), save=False)
    a = Attributor(tmp_path / "dead", Sum(), pairs(), loss=losses.CrossEntropy()).fit(method)
    torch.testing.assert_close(values(a.score(pairs(2))), values(right), rtol=1e-3, atol=1e-5)
    a.build(dim=100)
    torch.testing.assert_close(values(a.score(pairs(2))), values(right), rtol=1e-3, atol=1e-3)
