"""Losses and gradients that are not finite: named by the pass that sees them, or skipped."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from html_page import Page
from isokron import Attributor, losses
from isokron.attribution.data import spread
from isokron.curvature import fit
from isokron.tasks import Examples, load

Pairs = list[tuple[Tensor, Tensor]]
COUNT, BAD = 24, {5: "loss nan", 9: "loss inf", 17: "its gradient is not finite"}
WARNING = (
    r"3 of 24 training examples are skipped .*: row 5 \(loss nan\), row 9 \(loss inf\), row 17"
)
GOOD = [number for number in range(COUNT) if number not in BAD]
IDS = [f"row {number}" for number in range(COUNT)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def pairs(bad: dict[int, str] = BAD) -> Pairs:
    """Examples of which some are bad: of NaN; of an infinite loss; of a root at zero."""
    torch.manual_seed(1)
    data = [(torch.randn(4), torch.tensor(k % 3)) for k in range(COUNT)]
    for number, reason in bad.items():
        if reason == "loss nan":
            data[number] = torch.full((4,), float("nan")), data[number][1]
        else:
            data[number] = data[number][0], torch.tensor(7 if reason == "loss inf" else 8)
    return data


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over no tokens is infinite or NaN in this way; √0 has no finite gradient."""
    x, y = batch
    outputs = model(x)
    terms = functional.cross_entropy(outputs, y.clamp_max(2), reduction="none")
    distance = (outputs - outputs.detach()).square().sum(1)
    root = torch.where(y == 8, distance, 1.0).sqrt()
    return terms + torch.where(y == 7, float("inf"), 0.0) + torch.where(y == 8, root, 0.0)


def begun(folder: Path, data: Pairs, ids: list[str] = IDS, **options: Any) -> Attributor:
    return Attributor(folder, network(), data, **{"loss": loss, "ids": ids, **options})


@contextmanager
def skipping() -> Iterator[None]:
    with pytest.warns(UserWarning, match=WARNING):
        yield


def clean(folder: Path) -> Attributor:
    return begun(folder, [pairs()[n] for n in GOOD], [IDS[n] for n in GOOD])


def values(scores: Tensor) -> Tensor:
    return scores.as_subclass(Tensor)


STAGES: list[Callable[[Attributor], Any]] = [
    lambda a: a.fit(),
    lambda a: a.fit("ekfac"),
    lambda a: a.fit(None).build(dim=4),
    lambda a: a.fit(None).build(),
    lambda a: a.fit(None).score(pairs()[:1]),
    lambda a: a.fit(None).self_influence(),
]


@pytest.mark.parametrize("reason", ["loss nan", "loss inf"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_not_finite_is_named_by_the_first_pass_that_sees_it(
    stage: Callable[[Attributor], Any], reason: str, tmp_path: Path
) -> None:
    a = begun(tmp_path, pairs({11: reason}))
    rule = rf"example 'row 11' has a {reason.replace('loss ', 'loss of ')}; mend it, or go on"
    with pytest.raises(FloatingPointError, match=rf"{rule} .*on_bad='skip'"):
        stage(a)
    assert not (tmp_path / "scores").exists()
    with pytest.raises(FloatingPointError, match="row 11"):
        a.fit("tkfac") if a.folder.stage("fit") is None else a.build(dim=4)


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_a_document_of_nan_is_named_with_every_fisher(fisher: str, tmp_path: Path) -> None:
    a = begun(tmp_path, pairs({11: "loss nan"}), loss=losses.CrossEntropy())
    with pytest.raises(FloatingPointError, match="example 'row 11' has a loss of nan"):
        a.fit(fisher=fisher)
    inputs, targets = zip(*pairs({11: "loss nan"})[8:14], strict=True)
    batches = [(torch.stack(inputs), torch.stack(targets))]
    with pytest.raises(FloatingPointError, match="example 3 of batch 0 has a loss of nan; mend it"):
        fit(network(), batches, losses.CrossEntropy(), fisher=fisher)


@pytest.mark.parametrize("number", [0, 1])
def test_one_of_the_first_examples_is_named_before_a_folder_is_made(
    number: int, tmp_path: Path
) -> None:
    with pytest.raises(FloatingPointError, match=f"example 'row {number}' has a loss of nan"):
        begun(tmp_path / "run", pairs({number: "loss nan"}))
    assert not (tmp_path / "run").exists()


def test_a_query_is_named(tmp_path: Path) -> None:
    a = begun(tmp_path, pairs({})).fit()
    with pytest.raises(FloatingPointError, match=r"query 'query 1' has a loss of inf; ask without"):
        a.score([pairs()[0], pairs()[9]])
    with pytest.raises(FloatingPointError, match=r"query 'query 1' has a loss of inf; ask without"):
        a.build(4).score([pairs()[0], pairs()[9]])
    with pytest.raises(FloatingPointError, match=r"example 'row 17' for query .* is nan; mend it"):
        begun(tmp_path / "root", pairs({17: ""})).fit(None).score(pairs()[:1])


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_skipped_examples_change_nothing_for_the_others(method: str, tmp_path: Path) -> None:
    with skipping():
        a = begun(tmp_path / "run", pairs(), on_bad="skip").fit(method)
    right = clean(tmp_path / "clean").fit(method)
    queries = pairs()[:3]
    for stored in (False, True):
        if stored:
            for each in (a, right):
                each.build(dim=4)
        scores = a.score(queries, verify=True)
        assert scores.shape == (3, len(GOOD))
        assert scores.ids == [IDS[n] for n in GOOD]
        assert scores.skipped == {IDS[n]: reason for n, reason in BAD.items()}
        torch.testing.assert_close(values(scores), values(right.score(queries)))
    torch.testing.assert_close(a.self_influence(), right.self_influence())
    ((record),) = [json.loads(p.read_text()) for p in (tmp_path / "run").glob("scores/*.json")][:1]
    assert record["run"]["skipped"] == scores.skipped
    text = " ".join(Page(a.report().read_text(encoding="utf-8")).text.split())
    assert "3 training examples whose loss or gradient is not finite" in text
    assert "row 17 its gradient is not finite" in text


def test_a_run_remembers_what_it_skips(tmp_path: Path) -> None:
    stages: list[str] = []

    def progress(stage: str, *_: Any) -> None:
        stages.append(stage)

    options = {"on_bad": "skip", "progress": progress}
    with skipping():
        begun(tmp_path, pairs(), **options).fit()
    assert "check" in stages
    stages.clear()
    with skipping():  # told again, and not looked for
        a = begun(tmp_path, pairs(), **options).build(dim=4)
    assert "check" not in stages
    assert a.score(pairs()[:1], save=False).shape == (1, len(GOOD))
    with pytest.raises(ValueError, match=r"another source: .*skipped was"):
        begun(tmp_path, pairs())
    other = pairs()
    other[5] = pairs({})[5]  # what was bad has changed
    with skipping(), pytest.raises(ValueError, match=r"another source: data was"):
        begun(tmp_path, other, on_bad="skip")


def test_examples_without_results_are_looked_at_again(tmp_path: Path) -> None:
    with skipping():
        begun(tmp_path, pairs(), on_bad="skip")
    a = begun(tmp_path, pairs({}), on_bad="skip")
    assert a.skipped == {}
    assert a.fit().score(pairs()[:1], save=False).shape == (1, COUNT)


def test_data_of_which_nothing_is_finite_are_refused(tmp_path: Path) -> None:
    everything = pairs(dict.fromkeys(range(COUNT), "loss nan"))
    with pytest.raises(FloatingPointError, match="no training example has a finite loss"):
        begun(tmp_path / "nan", everything, on_bad="skip")
    with pytest.raises(ValueError, match=r"on_bad must be one of \('raise', 'skip'\), got 'drop'"):
        begun(tmp_path / "choice", pairs(), on_bad="drop")


def digits() -> Any:
    """A task of which two examples are bad, for the command line and evaluate."""
    task = load("digits-tiny")
    images, labels = task.train.tensors
    images = images.clone()
    images[[spread(len(images), 60)[k] for k in (3, 40)]] = float("nan")
    ids = [f"digit {number}" for number in range(len(images))]
    return replace(task, train=Examples((images, labels)), ids=ids)


def test_evaluate_retrains_without_skipped_examples(tmp_path: Path) -> None:
    from isokron.attribution.evaluate import evaluate
    from isokron.training import make_model, train_

    task, seen = digits(), []

    def train(task: Any, examples: Tensor, seed: int) -> nn.Module:
        model = make_model(task, seed)
        seen.append(task.train.batch(examples)[0])
        train_(model, task, 2, 1e-3, seed, examples=examples)
        return model.eval()

    model = load("digits-tiny").model()
    with pytest.warns(UserWarning, match=r"2 of 60 training examples are skipped"):
        a = Attributor(tmp_path, model, task=task, on_bad="skip", examples=60)
    evaluate(a.fit(), train, 2, subsets=3, dims=(4,), flipped=0)
    assert len(seen) == 3
    assert all(bool(images.isfinite().all()) for images in seen)
