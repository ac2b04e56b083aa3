"""Measures of quality against their definitions, and attribution held against retrained models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import logistic
import pytest
import torch
from torch import Tensor, nn

from isokron import Attributor, tasks
from isokron.attribution import read_queries
from isokron.attribution.evaluate import (
    Train,
    evaluate,
    lds_by_query,
    mislabel_auc,
    noise,
    random_subsets,
    ranks,
    retrain,
    spearman,
    with_flipped_labels,
)
from isokron.tasks import Examples, Task

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
    flipped = torch.rand(60, generator=generator) < 0.3
    scores = ((torch.randn(60, generator=generator) + flipped) * scale).round()
    over, under = scores[flipped][:, None], scores[~flipped]
    pairs = (over > under).double() + 0.5 * (over == under)
    assert mislabel_auc(scores, flipped) == pytest.approx(float(pairs.mean()), abs=1e-12)


def test_noise_is_the_rank_correlation_and_the_residual_of_a_sample() -> None:
    exact = torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1]])
    measured = noise(exact, exact + torch.tensor([[0.0, 0, 0, 2], [3, -3, 3, -3]]))
    assert measured.sample == 4
    assert measured.standard_error == pytest.approx([1.0, 3.0])
    second = float(spearman(exact[1], exact[1] + torch.tensor([3.0, -3, 3, -3])))
    assert measured.spearman == pytest.approx((1 + second) / 2)


def test_what_has_no_order_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN has no rank"):
        ranks(torch.tensor([1.0, float("nan")]))


def test_lds_is_one_where_losses_are_sums_of_scores() -> None:
    members = random_subsets(12, 30, 0.5, seed=4)
    assert members.sum(1).tolist() == [15] * 12
    assert len(members.unique(dim=0)) == 12
    assert random_subsets(5, 30, 0.5, seed=4).equal(members[:5])
    assert not random_subsets(12, 30, 0.5, seed=5).equal(members)
    scores = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    losses = -(members.double() @ scores.double().mT)
    losses[:, 1] *= -1
    found = lds_by_query(scores, members, losses)
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))


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
    members = random_subsets(24, EXAMPLES)
    batch = queries.batch(torch.arange(QUERIES))
    losses = retrain(tmp_path, task, logistic.fit, members, [batch])
    exact = logistic.influence(task, model, queries)
    assert float(lds_by_query(exact, members, losses).mean()) > 0.9
    assert float(lds_by_query(-exact, members, losses).mean()) < -0.9
    other = exact[:, torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(0))]
    assert abs(float(lds_by_query(other, members, losses).mean())) < 0.2


def fitted(folder: Path, task: Task) -> Attributor:
    model = logistic.fit(task, torch.arange(len(task.train)), 0)
    return Attributor(folder, model, task=task).fit()


def test_larger_projections_keep_the_order_of_scores_better(tmp_path: Path) -> None:
    task = tasks.load("speeches")
    train = Examples(tuple(tensor[:600] for tensor in task.train.tensors))
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for numbers in torch.randint(0, len(train), (60, 16), generator=generator):
        optimizer.zero_grad()
        task.losses(model, train.batch(numbers)).mean().backward()
        optimizer.step()
    scored = replace(task, train=Examples(train.batch(torch.arange(150) * 4)), ids=())
    a = Attributor(tmp_path, model, task=scored).fit()
    queries = read_queries(scored, model, ["eval:0-5"])
    exact = a.score(queries, save=False)
    by_dim = {
        dim: float(spearman(a.projected_scores(queries, dim), exact).mean()) for dim in (4, 16, 400)
    }
    assert by_dim[4] < by_dim[16] < by_dim[400]
    assert by_dim[16] > 0.7
    assert by_dim[400] == pytest.approx(1, abs=1e-4)  # no layer is as large


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Killed(Exception):
    pass


def test_a_killed_evaluation_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    task = logistic.digits(EXAMPLES)
    # one that counts its calls is another function each time
    settings: dict[str, Any] = {"dims": (4, 16), "training": "logistic regression"}
    complete = fitted(tmp_path / "complete", task)
    results = evaluate(complete, logistic.fit, 10, subsets=12, **settings)
    assert results["lds"]["kfac"]["mean"] > results["lds"]["gradients"]["mean"]
    assert results["lds"]["kfac"]["mean"] > 0.6
    assert results["mislabelled"]["self-influence"] > 0.95
    assert results["mislabelled"]["loss"] > 0.9
    assert results["projected"]["4"] < results["projected"]["16"] <= 1
    done = 0

    def dies(task: Task, indices: Tensor, seed: int) -> nn.Module:
        nonlocal done
        done += 1
        if done == 6:
            raise Killed
        return logistic.fit(task, indices, seed)

    run = fitted(tmp_path / "killed", task)
    folder = tmp_path / "killed" / "evaluation"
    with pytest.raises(Killed):
        evaluate(run, dies, 10, subsets=12, **settings)
    assert len(list((folder / "subsets").iterdir())) == 5
    assert evaluate(run, dies, 10, subsets=12, **settings) == results
    assert done == 6 + 7 + 1  # the subsets that were left, and one model with wrong labels
    assert contents(folder) == contents(tmp_path / "complete" / "evaluation")
    assert json.loads((folder / "evaluation.json").read_text()) == results
    with pytest.raises(ValueError, match=r"has another evaluation: seed was .*; give a new"):
        evaluate(run, dies, 10, subsets=12, **settings, seed=1)


def test_a_task_without_labels_is_evaluated_without_them(tmp_path: Path) -> None:
    run = fitted(tmp_path, replace(logistic.digits(80), logits=None))
    results = evaluate(run, logistic.fit, 3, subsets=3, dims=())
    assert results["mislabelled"] is None
    assert results["projected"] == {}


def test_a_run_without_curvature_is_not_evaluated(tmp_path: Path) -> None:
    task = logistic.digits(80)
    run = Attributor(tmp_path, logistic.fit(task, torch.arange(80), 0), task=task)
    with pytest.raises(ValueError, match=r"has no curvature; give the task, then fit"):
        evaluate(run, logistic.fit)


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
    both = retrain(tmp_path, task, untrained, random_subsets(2, 80), [batch], repeats=2)
    assert torch.random.get_rng_state().equal(state)
    assert len(set(seeds)) == 4
    for k in range(2):
        records = [json.loads((tmp_path / f"0000{k}-{r}.json").read_text()) for r in range(2)]
        mean = torch.tensor([record["result"] for record in records], dtype=torch.float64).mean(0)
        assert both[k].equal(mean)


def test_losses_of_other_queries_are_refused(tmp_path: Path) -> None:
    task = logistic.digits(80)
    first, second = (task.evaluation.batch(torch.tensor([k])) for k in range(2))
    retrain(tmp_path, task, logistic.fit, random_subsets(1, 80), [first])
    with pytest.raises(ValueError, match="queries was"):
        retrain(tmp_path, task, logistic.fit, random_subsets(1, 80), [second])


def test_a_model_that_diverged_is_told_of(tmp_path: Path) -> None:
    task = logistic.digits(80)

    def diverges(task: tasks.Task, indices: Tensor, seed: int) -> nn.Module:
        model = task.model()
        nn.init.constant_(model[1].weight, float("nan"))
        return model

    with pytest.raises(FloatingPointError, match="has a loss of nan on query 0"):
        retrain(
            tmp_path,
            task,
            diverges,
            random_subsets(1, 80),
            [task.evaluation.batch(torch.arange(2))],
        )


def trained_at(rate: float) -> Train:
    """Logistic regression for whose weights the rate matters, and so does nothing else."""

    def train(task: tasks.Task, indices: Tensor, seed: int) -> nn.Module:
        model = logistic.fit(task, indices, seed)
        with torch.no_grad():
            model[1].weight.mul_(rate)
        return model

    return train


def test_models_of_two_trainings_are_not_mixed(tmp_path: Path) -> None:
    task = logistic.digits(80)
    batch = [task.evaluation.batch(torch.arange(3))]
    retrain(tmp_path / "a", task, trained_at(1.0), random_subsets(2, 80), batch)
    again = retrain(tmp_path / "a", task, trained_at(1.0), random_subsets(3, 80), batch)
    assert len(again) == 3
    shifted = replace(task, train=Examples((task.train.tensors[0] + 1, task.train.tensors[1])))
    for other, train in ((task, trained_at(0.5)), (shifted, trained_at(1.0))):
        with pytest.raises(ValueError, match=r"training was '\w+', is '\w+'; .* or remove .*a"):
            retrain(tmp_path / "a", other, train, random_subsets(2, 80), batch)
    # by its name, whatever the function is
    for rate in (1.0, 0.5):
        retrain(
            tmp_path / "b", task, trained_at(rate), random_subsets(1, 80), batch, training="half"
        )


def test_a_training_function_without_a_digest_is_refused(tmp_path: Path) -> None:
    task, file = logistic.digits(80), (tmp_path / "log").open("w")

    def train(task: tasks.Task, indices: Tensor, seed: int) -> nn.Module:
        print(seed, file=file)
        return logistic.fit(task, indices, seed)

    batch = [task.evaluation.batch(torch.arange(3))]
    with file, pytest.raises(ValueError, match=r"TextIOWrapper has no digest.* give training='a"):
        retrain(tmp_path, task, train, random_subsets(1, 80), batch)
