"""Weights, NaN, empty batches, ignored targets, single examples and dead layers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron import Attributor, losses
from isokron.attribution import Query
from isokron.attribution.data import to_device
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
    a = begun(tmp_path / "plain", data, loss=weighted).fit(None)
    model, rows = a.subject.model, []
    for x, y, w in data:
        loss = w * nn.functional.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    right = torch.stack(rows) @ torch.stack(rows).mT
    asked = [0, 1, 3, 4, 5]
    scores = values(a.score([data[number] for number in asked]))
    torch.testing.assert_close(scores, right[asked], rtol=1e-4, atol=1e-5)
    fitted = begun(tmp_path / "kfac", data, loss=weighted).fit()
    cosines = values(fitted.score([data[0]], unit=True, save=False))
    torch.testing.assert_close(cosines[0, 0], torch.tensor(1.0), rtol=1e-3, atol=0)
    assert cosines[0, 2] == 0  # of weight 0


def test_a_query_without_examples_is_refused(tmp_path: Path) -> None:
    a = begun(tmp_path, pairs()).fit()
    empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"query 'nothing' has no loss term"):
        a.score([Query(empty, (Shown(),), "nothing")])
    with pytest.raises(ValueError, match="queries must have at least one example"):
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


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="none"), nn.MSELoss()])
def test_a_module_of_torch_is_no_loss(loss: nn.Module, tmp_path: Path) -> None:
    rule = r"a function \(model, batch\) → loss per example"
    got = rf"got the module {type(loss).__name__}; give loss=isokron.losses.CrossEntropy\(\)"
    with pytest.raises(ValueError, match=f"{rule}, {got}"):
        begun(tmp_path / "run", pairs(), loss=loss)
    assert not (tmp_path / "run").exists()


def test_two_examples_of_one_name_are_refused(tmp_path: Path) -> None:
    data = [(torch.randn(4), torch.tensor(0)) for _ in range(3)]
    with pytest.raises(
        ValueError, match="ids must be 3 different names, one per example, got 3 of which 2 differ"
    ):
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


def test_the_cosine_of_a_convolution_counts_layers_of_fewer_positions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    data = list(zip(torch.randn(8, 1, 6, 6), torch.arange(8) % 4, strict=True))
    a = Attributor(tmp_path, model, data, loss=losses.CrossEntropy()).fit()
    own = a.score(data[:1]).answers[0]["proponents"]
    cosines = {item["example"]: item["cosine"] for item in own}
    assert cosines[0] == pytest.approx(1.0, abs=1e-3)
    unit = values(a.score(data[:1], unit=True, save=False))[0]
    for example, cosine in cosines.items():
        assert cosine == pytest.approx(float(unit[example]), abs=1e-4)


def test_noise_of_cosines_is_that_of_cosines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = list(zip(torch.randn(40, 30), torch.randint(0, 20, (40,)), strict=True))
    model = nn.Linear(30, 20)
    a = Attributor(tmp_path, model, data, loss=losses.CrossEntropy()).fit().build(dim=16)
    unit = a.score(data[:3], unit=True, save=False)
    assert max(unit.noise.standard_error) < 0.5
    nearest = a.score(data[:3], mode="nearest", save=False).noise.standard_error
    each = a.score(data[:3], save=False).noise.standard_error
    assert nearest == [max(each)]


def test_curvature_fitted_by_another_object_is_used(tmp_path: Path) -> None:
    first, second = begun(tmp_path, pairs()), begun(tmp_path, pairs())
    with pytest.warns(UserWarning, match=r"fit\(\) was not called: H is the identity"):
        plain = values(first.score(pairs(1), save=False))
    second.fit()
    assert not values(first.fit().score(pairs(1), save=False)).equal(plain)


def test_mappings_of_any_class_are_moved_to_a_device() -> None:
    class Fields(dict):  # type: ignore[type-arg]
        pass

    moved = to_device(Fields(x=torch.ones(2), name="a"), torch.device("meta"))
    assert type(moved) is Fields
    assert moved["x"].device.type == "meta"


def test_texts_are_no_queries_of_python(tmp_path: Path) -> None:
    a = begun(tmp_path, pairs())
    for queries in ("a text", ["eval:0"]):
        with pytest.raises(ValueError, match=r"got a text; read texts with .*read_queries"):
            a.score(queries)


def test_a_store_that_does_not_fit_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    begun(tmp_path, pairs()).fit()
    loss = losses.CrossEntropy()
    a = Attributor(tmp_path, network(4, 5, 3), pairs(), loss=loss, memory=1000)
    with pytest.raises(ValueError, match=r"whitening .* does not fit"):
        a.build(dim=4)
    assert a.folder.stage("build") is None


def test_examples_at_the_top_are_not_taken_for_random_ones(tmp_path: Path) -> None:
    check = begun(tmp_path, pairs()).fit().score(pairs(1), top=6, verify=True).answers[0]["verify"]
    assert check["proponents"] < 0
    assert check["random"] is None


def test_verify_takes_a_likelihood_that_cannot_be_called_and_half_precision(tmp_path: Path) -> None:
    class Own:
        """The protocol of isokron.losses and no more."""

        def __init__(self) -> None:
            right = losses.CrossEntropy()
            self.forward, self.weights, self.terms = right.forward, right.weights, right.terms
            self.draw, self.roots = right.draw, right.roots

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).bfloat16()
    data = [(x.bfloat16(), y) for x, y in pairs()]
    a = Attributor(tmp_path, model, data, loss=Own()).fit()
    answer = a.score(data[:1], verify=True).answers[0]
    assert answer["verify"]["proponents"] < 0
