"""Measures of quality against their definitions, and attribution held against retrained models."""

import json
from dataclasses import replace
from pathlib import Path

import logistic
import pytest
import torch
from torch import Tensor, nn

from isokron import tasks
from isokron.attribution.influence import on_oneself
from isokron.attribution.quality.evaluation import evaluate
from isokron.attribution.quality.labels import with_flipped_labels
from isokron.attribution.quality.measures import compression, lds, lds_by_query
from isokron.attribution.quality.mislabelling import mislabel_auc
from isokron.attribution.quality.ranks import auc, ranks, spearman
from isokron.attribution.quality.retraining import Retrained, retrain, subsets
from isokron.attribution.run import Run
from isokron.attribution.subject import Subject
from isokron.attribution.verbs import Build, Fit, build, fit
from isokron.curvature import fit as fit_curvature
from isokron.tasks import Examples

EXAMPLES, QUERIES = 400, 25


def naive_ranks(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_of_equals_are_the_mean_of_theirs(ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, 50, generator=generator)
    values = (4 * values).round() if ties else values
    for row, found in zip(values.view(12, -1), ranks(values).view(12, -1), strict=True):
        assert found.tolist() == naive_ranks(row.tolist())
    assert ranks(torch.zeros(1)).tolist() == [0.0]


@pytest.mark.parametrize("ties", [False, True])
def test_spearman_is_the_correlation_of_ranks(ties: bool) -> None:
    x, y = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = y + x
    if ties:
        x, y = (3 * x).round(), y.round()
    for k in range(5):
        pair = torch.tensor([naive_ranks(x[k].tolist()), naive_ranks(y[k].tolist())])
        torch.testing.assert_close(
            spearman(x, y)[k], torch.corrcoef(pair.double())[0, 1], rtol=1e-6, atol=1e-6
        )
    assert spearman(x[0], x[0].exp()) == pytest.approx(1)
    assert spearman(x[0], -x[0]) == pytest.approx(-1)
    assert spearman(x[0], torch.ones(40)) == 0


def test_spearman_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    x, y = torch.randn(2, 60, generator=torch.Generator().manual_seed(2)).mul(2).round()
    assert float(spearman(x, y)) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


@pytest.mark.parametrize("scale", [1e6, 2.0])
def test_auc_counts_pairs_and_halves_of_equals(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    positive = torch.rand(60, generator=generator) < 0.3
    scores = ((torch.randn(60, generator=generator) + positive) * scale).round()
    over, under = scores[positive][:, None], scores[~positive]
    pairs = (over > under).double() + 0.5 * (over == under)
    assert auc(scores, positive) == pytest.approx(float(pairs.mean()), abs=1e-12)


def test_what_has_no_order_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN has no rank"):
        ranks(torch.tensor([1.0, float("nan")]))
    with pytest.raises(ValueError, match="one shape"):
        spearman(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="both kinds, got 0 positive"):
        auc(torch.zeros(3), torch.zeros(3, dtype=torch.bool))


def test_lds_is_one_where_losses_are_sums_of_scores() -> None:
    members = subsets(12, 30, 0.5, seed=4)
    assert members.sum(1).tolist() == [15] * 12
    assert len(members.unique(dim=0)) == 12
    assert subsets(5, 30, 0.5, seed=4).equal(members[:5])
    assert not subsets(12, 30, 0.5, seed=5).equal(members)
    scores = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    losses = -(members.double() @ scores.double().mT)
    losses[:, 1] *= -1
    found = lds_by_query(scores, Retrained(members, losses))
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))
    assert lds(scores, Retrained(members, losses)) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"\[queries, examples\] = \[3, 30\]"):
        lds(scores.mT, Retrained(members, losses))


def test_as_many_labels_are_flipped_as_asked_for_and_each_to_another() -> None:
    task = logistic.digits(EXAMPLES)
    changed, flipped = with_flipped_labels(task, 0.1, seed=7)
    assert int(flipped.sum()) == EXAMPLES // 10
    assert (changed.train.tensors[1] != task.train.tensors[1]).equal(flipped)
    assert changed.train.tensors[0] is task.train.tensors[0]
    assert len(changed.train.tensors[1][flipped].unique()) > 5
    again, same = with_flipped_labels(task, 0.1, seed=7)
    assert again.train.tensors[1].equal(changed.train.tensors[1])
    assert same.equal(flipped)
    assert not with_flipped_labels(task, 0.1, seed=8)[1].equal(flipped)
    with pytest.raises(ValueError, match="no labels to flip"):
        with_flipped_labels(replace(task, logits=None), 0.1, seed=0)


def test_numbers_of_speeches_are_not_taken_for_labels() -> None:
    with pytest.raises(ValueError, match="no labels to flip"):
        with_flipped_labels(tasks.load("speeches"), 0.1, seed=0)


def test_exact_influence_foretells_what_retraining_does(tmp_path: Path) -> None:
    task = logistic.digits(EXAMPLES)
    model = logistic.fit(task, torch.arange(EXAMPLES), 0)
    queries = Examples(tuple(tensor[:QUERIES] for tensor in task.evaluation.tensors))
    outcome = retrain(
        tmp_path, task, logistic.fit, subsets(24, EXAMPLES), [queries.batch(torch.arange(QUERIES))]
    )
    exact = logistic.influence(task, model, queries)
    assert lds(exact, outcome) > 0.9
    assert lds(-exact, outcome) < -0.9
    other = exact[:, torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(0))]
    assert abs(lds(other, outcome)) < 0.2


def test_self_influence_finds_wrong_labels() -> None:
    task, flipped = with_flipped_labels(logistic.digits(EXAMPLES), 0.1, seed=0)
    subject = Subject(task, logistic.fit(task, torch.arange(EXAMPLES), 0))
    found = fit_curvature(subject.model, list(subject.batches()), subject.loss)
    inverse = found.inverse(0.1, relative=True)
    own, losses = on_oneself(subject, inverse)
    assert mislabel_auc(own, flipped) > 0.95
    assert mislabel_auc(losses, flipped) > 0.9
    by_hand = Subject(replace(task, batch_size=1), subject.model)
    torch.testing.assert_close(on_oneself(by_hand, inverse)[0], own, rtol=1e-4, atol=1e-6)


def small_gpt() -> Subject:
    """Trained for a few steps, so that its gradients differ."""
    task = tasks.load("speeches")
    train = Examples(tuple(tensor[:600] for tensor in task.train.tensors))
    task = replace(task, train=train, ids=task.ids[:600])
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in train_batches(train, 60):
        optimizer.zero_grad()
        task.losses(model, batch).mean().backward()
        optimizer.step()
    return Subject(task, model.eval(), examples=150)


def train_batches(train: Examples, steps: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, len(train), (steps, 16), generator=generator)
    return [train.batch(each) for each in numbers]


def test_whitened_projections_keep_the_order_of_scores() -> None:
    subject = small_gpt()
    curvature = fit_curvature(subject.model, list(subject.batches()), subject.loss)
    queries = [subject.task.evaluation.batch(torch.arange(6))]
    found = compression(subject, curvature, queries, (4, 16, 400))
    for way in ("plain", "whitened"):
        assert found[way][4] < found[way][16] < found[way][400]
        assert found[way][400] == pytest.approx(1, abs=1e-4)  # no side is as large
    assert found["whitened"][16] > max(0.65, found["plain"][16] + 0.1)
    corrected = fit_curvature(subject.model, list(subject.batches()), subject.loss, "ekfac")
    assert set(compression(subject, corrected, queries, (4,))) == {"plain"}


def begun(folder: Path) -> Run:
    task = logistic.digits(EXAMPLES)
    run = Run.begin(folder, Subject(task, logistic.fit(task, torch.arange(EXAMPLES), 0)))
    fit(run, Fit())
    build(run, Build(dim=16))
    return run


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Killed(Exception):
    pass


def test_a_killed_evaluation_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    options = {"subsets": 12, "queries": 10, "dims": (4, 16)}
    found = evaluate(begun(tmp_path / "whole"), logistic.fit, **options)
    assert found["lds"]["kfac"]["mean"] > found["lds"]["gradients"]["mean"]
    assert found["lds"]["kfac"]["mean"] > 0.6
    assert found["mislabelled"]["self-influence"] > 0.95
    assert set(found["lds"]) == {"gradients", "kfac", "store, whitened, p = 16"}
    done = 0

    def dies(task: tasks.Task, indices: Tensor, seed: int) -> nn.Module:
        nonlocal done
        done += 1
        if done == 6:
            raise Killed
        return logistic.fit(task, indices, seed)

    run = begun(tmp_path / "killed")
    with pytest.raises(Killed):
        evaluate(run, dies, **options)
    assert len(list((run.folder / "evaluation" / "subsets").iterdir())) == 5
    assert evaluate(run, dies, **options) == found
    assert done == 6 + 7 + 1  # what was left, and one with wrong labels
    whole, again = contents(tmp_path / "whole"), contents(tmp_path / "killed")
    assert whole == again
    assert {"evaluation/evaluation.json", "evaluation/quality.svg"} < set(whole)
    assert json.loads(whole["evaluation/evaluation.json"]) == found
    assert b"whitened" in whole["evaluation/quality.svg"]
    with pytest.raises(ValueError, match="another evaluate: seed was 0, is 1"):
        evaluate(run, dies, **options, seed=1)


def test_losses_of_several_seeds_are_averaged(tmp_path: Path) -> None:
    task = logistic.digits(80)
    seeds: list[int] = []

    def untrained(task: tasks.Task, indices: Tensor, seed: int) -> nn.Module:
        assert torch.initial_seed() == seed
        assert len(indices) == 40
        seeds.append(seed)
        return task.model()

    state = torch.random.get_rng_state()
    batch = task.evaluation.batch(torch.arange(3))
    both = retrain(tmp_path, task, untrained, subsets(2, 80), [batch], repeats=2)
    assert torch.random.get_rng_state().equal(state)
    assert len(set(seeds)) == 4
    for k in range(2):
        records = [json.loads((tmp_path / f"0000{k}-{r}.json").read_text()) for r in range(2)]
        mean = torch.tensor([each["losses"] for each in records], dtype=torch.float64).mean(0)
        assert both.losses[k].equal(mean)


def test_losses_of_other_queries_are_refused(tmp_path: Path) -> None:
    task = logistic.digits(80)
    first, second = (task.evaluation.batch(torch.tensor([k])) for k in range(2))
    retrain(tmp_path, task, logistic.fit, subsets(1, 80), [first])
    with pytest.raises(ValueError, match="queries was"):
        retrain(tmp_path, task, logistic.fit, subsets(1, 80), [second])


def test_a_model_that_diverged_is_told_of(tmp_path: Path) -> None:
    task = logistic.digits(80)

    def diverges(task: tasks.Task, indices: Tensor, seed: int) -> nn.Module:
        model = task.model()
        nn.init.constant_(model[1].weight, float("nan"))
        return model

    with pytest.raises(FloatingPointError, match="subset 0 has a loss of nan on query 0"):
        retrain(tmp_path, task, diverges, subsets(1, 80), [task.evaluation.batch(torch.arange(2))])
