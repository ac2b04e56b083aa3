"""Derivatives through training runs, against finite differences of retraining in float64."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import letters
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import isokron
from isokron import Attributor
from isokron.attribution.evaluate import evaluate, spearman
from isokron.attribution.task_run import task_run
from isokron.attribution.unroll import TrainingRun
from isokron.tasks import Examples, Task
from isokron.training import batch_order, make_model, make_optimizer, train_, warmup_cosine

STEPS, EXAMPLES, QUERIES = 20, 18, 3
CHECKED = range(0, EXAMPLES, 3)
Build = Callable[[nn.Module], Optimizer]


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def small_task(model: Callable[[], nn.Module] = perceptron, dead: bool = True) -> Task:
    """18 examples in batches of 6, so that 20 steps see every example six or seven times.

    A dead input, always 0, has weights whose gradient and second moment stay 0.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES + QUERIES, 5, generator=generator, dtype=torch.float64)
    inputs[:, 0] *= not dead
    labels = torch.randint(0, 3, (EXAMPLES + QUERIES,), generator=generator)
    train, held_out = (Examples((inputs[s], labels[s])) for s in (slice(18), slice(18, None)))
    return Task("small", model, train, held_out, losses, batch_size=6)


def grouped(name: str, **settings: Any) -> Build:
    return lambda model: getattr(isokron, name)(isokron.param_groups(model), lr=3e-2, **settings)


OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "adamw": grouped("AdamW"),
    "muon": grouped("Muon"),
    "corrected": grouped("AdamW", decay="corrected", weight_decay=0.5),
    "engine": grouped("Preconditioned", momentum=0.9, decay="l2", weight_decay=0.01),
    "shampoo": grouped("Shampoo", every=4),
    "shampoo-kl": grouped("Shampoo", every=3, statistic="kl", graft=None, refresh="together"),
    "shampoo-blocks": grouped("Shampoo", every=4, exponent=None, max_dim=4),
    "katie": grouped("Katie", every=4),
    "katie-momentum": lambda m: isokron.Katie(
        isokron.param_groups(m, momentum=0.6, dampening=0.2, decay="momentum", beta3=0.5),
        lr=3e-2,
        every=4,
    ),
    "katie-symmetric": grouped("Katie", every=2, form="symmetric"),
}
OPERATORS: dict[str, Build] = {
    "soap": grouped("SOAP", every=4),
    "soap-rotated": grouped("SOAP", every=4, graft=None, max_dim=4),
}


def run_of(build: Build, task: Task | None = None) -> TrainingRun:
    task = task or small_task()
    model = make_model(task, 0)
    return task_run(task, model, build(model), STEPS, 0)


def query_losses(task: Task) -> Callable[[Any], Tensor]:
    inputs, labels = task.held_out.tensors
    model = make_model(task, 0)

    def of(params: Any) -> Tensor:
        outputs = functional_call(model, params, (inputs,))
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    return of


def finite_differences(
    train: Callable[[Tensor], Any], queries: Callable[[Any], Tensor], step: float = 1e-5
) -> Tensor:
    """−∂q/∂w by two retrained models for each of some examples: [Q, 6]"""
    columns = []
    for i in CHECKED:
        weights = torch.ones(2, EXAMPLES, dtype=torch.float64)
        weights[0, i] -= step
        weights[1, i] += step
        low, high = (queries(train(row)).detach() for row in weights)
        columns.append((low - high) / (2 * step))
    return torch.stack(columns, 1)


def assert_close(scores: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert float(expected.norm()) > 1e-2
    assert float((scores[:, list(CHECKED)] - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OPERATORS])
def test_a_functional_run_ends_where_the_optimizer_does(name: str) -> None:
    # eigenvectors of a dead input are arbitrary, and depend on rounding errors
    build, task = {**OPTIMIZERS, **OPERATORS}[name], small_task(dead=name in OPTIMIZERS)
    model = make_model(task, 0)
    params = run_of(build, task).train()
    optimizer = build(model)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, STEPS))
    for indices in batch_order(EXAMPLES, 6, STEPS, 0):
        optimizer.zero_grad()
        losses(model, task.train.batch(indices)).mean().backward()
        optimizer.step()
        schedule.step()
    for key, param in model.named_parameters():
        torch.testing.assert_close(params[key], param.detach(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scores_are_the_derivative_of_retraining(name: str) -> None:
    run, queries = run_of(OPTIMIZERS[name]), query_losses(small_task())
    scores = run.scores(queries)
    assert scores.shape == (QUERIES, EXAMPLES)
    assert_close(scores, finite_differences(run.train, queries))


@pytest.mark.parametrize("name", OPERATORS)
def test_with_operators_scores_are_the_derivative_at_the_operators_of_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = small_task(dead=False)
    model = make_model(task, 0)
    optimizer = OPERATORS[name](model)
    # what comes from statistics: operators, and how SOAP's variances turn with its bases
    functions = [(type(optimizer), "refresh"), (isokron.optim.soap, "turned_variances")]
    results: dict[str, list[Any]] = {name: [] for _, name in functions}

    def recording(owner: Any, function: str) -> Callable[..., Any]:
        compute = getattr(owner, function)

        def record(*arguments: Any) -> Any:
            results[function].append(compute(*arguments))
            return results[function][-1]

        return record

    for owner, function in functions:
        monkeypatch.setattr(owner, function, recording(owner, function))
    run = task_run(task, model, optimizer, STEPS, 0)
    run.train()
    assert len(results["refresh"]) > 3

    def train_frozen(weights: Tensor) -> Any:
        """Train with the recorded results, whatever the gradients are."""
        for owner, function in functions:
            replayed = iter(results[function])
            monkeypatch.setattr(owner, function, lambda *_, replayed=replayed: next(replayed))
        return run.train(weights)

    queries = query_losses(task)
    expected = finite_differences(train_frozen, queries)
    monkeypatch.undo()
    assert_close(run_of(OPERATORS[name], task).scores(queries), expected)


def own_run(step: Callable[..., Any] | None = None) -> TrainingRun:
    """Gradient descent with momentum on a linear model, written by hand."""
    task = small_task()

    def descend(params: Any, state: Any, batch: Any, weights: Tensor) -> tuple[Any, Any]:
        outputs = batch[0] @ params["weight"].mT
        terms = nn.functional.cross_entropy(outputs, batch[1], reduction="none")
        loss = (weights * terms).sum() / len(terms)
        (grad,) = torch.autograd.grad(loss, params["weight"], create_graph=True)
        velocity = 0.9 * state + grad
        return {"weight": params["weight"] - 0.3 * velocity}, velocity

    weight = torch.zeros(3, 5, dtype=torch.float64)
    order = list(batch_order(EXAMPLES, 4, 15, 1))
    params = {"weight": weight}
    return TrainingRun(step or descend, params, weight, task.train.batch, order, EXAMPLES)


def linear_queries(params: Any) -> Tensor:
    inputs, labels = small_task().held_out.tensors
    outputs = inputs @ params["weight"].mT
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def test_a_loop_of_ones_own_is_unrolled_with_segments_of_any_length() -> None:
    run = own_run()
    expected = finite_differences(run.train, linear_queries)
    for memory in (0, 2000, 2**30):
        assert_close(run.scores(linear_queries, memory=memory), expected)
    for segment in (1, 4, 15, 99):
        assert_close(run.scores(linear_queries, segment=segment), expected)


def test_a_loop_that_ends_elsewhere_when_repeated_is_refused() -> None:
    run = own_run()
    noise = torch.Generator().manual_seed(0)

    def noisy(params: Any, state: Any, batch: Any, weights: Tensor) -> tuple[Any, Any]:
        params, state = run.step(params, state, batch, weights)
        extra = torch.randn(3, 5, generator=noise, dtype=torch.float64)
        return {"weight": params["weight"] + 1e-3 * extra}, state

    for segment, steps in ((4, "9 to 12"), (15, "1 to 1")):
        with pytest.raises(ValueError, match=rf"steps {steps} ended elsewhere .* computed again"):
            own_run(noisy).scores(linear_queries, segment=segment)


def test_a_step_without_weights_or_of_another_form_is_refused() -> None:
    run = own_run()

    def unweighted(params: Any, state: Any, batch: Any, weights: Tensor) -> tuple[Any, Any]:
        return run.step(params, state, batch, torch.ones_like(weights))

    with pytest.raises(ValueError, match="step must depend on the weights"):
        own_run(unweighted).scores(linear_queries)
    with pytest.raises(ValueError, match="in the form in which it gets them"):
        own_run(lambda params, state, *_: (params, [state])).scores(linear_queries)
    with pytest.raises(ValueError, match="one differentiable loss per query"):
        run.scores(lambda params: linear_queries(params).sum())


def test_dropout_is_that_of_the_run() -> None:
    task = small_task(lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
    task = Task(**{**vars(task), "model": lambda m=task.model: m().double()})
    run = run_of(OPTIMIZERS["adamw"], task)
    model = make_model(task, 0)
    queries = query_losses(task)

    def still(params: Any) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return queries(params)

    assert_close(run.scores(still), finite_differences(run.train, still))
    trained = copy.deepcopy(model)
    train_(trained, task, STEPS, 3e-2, 0)
    torch.testing.assert_close(run.train(), dict(trained.named_parameters()), rtol=0, atol=1e-8)


class Attention(nn.Module):
    """Inputs [n, 5] as three tokens of width 4, by attention, to class scores [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(5, 36).double(), nn.Linear(12, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        parts = self.inputs(inputs).view(-1, 1, 3, 12).chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(*parts).flatten(1))


def test_attention_that_torch_fuses_is_unrolled() -> None:
    task = small_task(Attention)
    run, queries = run_of(OPTIMIZERS["adamw"], task), query_losses(task)
    assert_close(run.scores(queries), finite_differences(run.train, queries))


def test_what_has_no_derivative_is_refused() -> None:
    def batch_norm() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()

    with pytest.raises(ValueError, match=r"buffer '1.running_mean' changes in training"):
        run_of(OPTIMIZERS["adamw"], small_task(batch_norm))
    wrong = {
        "got Adagrad; write your own step": lambda m: torch.optim.Adagrad(m.parameters()),
        "Skew cannot be unrolled": grouped("Skew"),
        "unrolling needs average=None": grouped("AdamW", average="primal"),
        "unrolling needs amsgrad=False": grouped("AdamW", amsgrad=True),
        "needs coefficients, such as 'classic', got None": grouped("Muon", coefficients=None),
        "needs refresh='together' or 'staggered', got 2": grouped("SOAP", refresh=2),
    }
    for message, build in wrong.items():
        with pytest.raises(ValueError, match=message):
            run_of(build)

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = (nn.Linear(5, 3).double() for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    with pytest.raises(ValueError, match=r"'unused.weight' has no gradient in step 1"):
        run_of(OPTIMIZERS["adamw"], small_task(Unused)).train()


def unrolled(folder: Path, **changes: Any) -> Attributor:
    """A run on letters, trained for 12 steps, with the training run that made its model."""
    task = letters.task()
    model, trained = (make_model(task, 0) for _ in range(2))
    train_(trained, task, 12, 3e-2, 0)
    settings = {"steps": 12, "seed": 0, **changes}
    run = task_run(task, model, make_optimizer(model, 3e-2), **settings)
    return Attributor(folder, trained, task=task).fit("unroll", run=run)


def test_an_attributor_scores_by_its_training_run(tmp_path: Path) -> None:
    a = unrolled(tmp_path / "run")
    task = letters.task()
    queries = [(row,) for row in task.held_out.tensors[0][:2]]
    scores = a.score(queries, name="two")
    assert scores.shape == (2, 32)
    a.score(queries[:1], name="one")
    assert {path.name for path in (tmp_path / "run/scores").glob("*.json")} >= {
        "one.json",
        "two.json",
    }
    assert scores.answers[0]["proponents"][0]["nats"] == scores.answers[0]["proponents"][0]["score"]
    mean = a.score(queries, mode="mean", save=False)
    torch.testing.assert_close(torch.Tensor(mean[0]), torch.Tensor(scores).mean(0))
    page = a.report().read_text()
    assert "derivative through the training run, unrolled" in page
    # the prediction of the first order for one example that is left out
    query = scores.top(1)[0].proponents[0]
    others = torch.arange(32)[torch.arange(32) != query.example]
    with torch.no_grad():
        before, after = (
            5 * float(task.losses(model, (queries[0][0][None],)))
            for model in (a.subject.model, a.exact.retrained(task, others, 0))
        )
    assert after - before == pytest.approx(query.score, rel=0.3)


def test_an_unrolled_run_refuses_what_it_does_not_have(tmp_path: Path) -> None:
    a = unrolled(tmp_path / "run")
    query = [(letters.task().held_out.tensors[0][0],)]
    for options in ({"by_layer": True}, {"unit": True}):
        with pytest.raises(ValueError, match="must be False for an unrolled run"):
            a.score(query, **options)
    with pytest.raises(ValueError, match="damping has no meaning"):
        a.score(query, damping=0.1)
    with pytest.raises(ValueError, match="refine has no meaning"):
        a.score(query, refine=2)
    with pytest.raises(ValueError, match="store has no meaning"):
        a.score(query, store=True)
    with pytest.raises(ValueError, match="has no gradients to store"):
        a.build()
    with pytest.raises(ValueError, match="no self-influence"):
        a.self_influence()
    again = Attributor(tmp_path / "run", a.subject.model, task=letters.task())
    with pytest.raises(ValueError, match=r"call fit\('unroll', run=…\) first"):
        again.score(query)
    with pytest.raises(ValueError, match="needs a task, one process, and the training run"):
        again.fit("unroll")
    with pytest.raises(ValueError, match="run is for fit"):
        again.fit("kfac", run=a.exact.run)
    other = unrolled(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="give the run that made the model"):
        other.score(query)


def test_a_run_that_could_not_be_unrolled_is_fitted_instead(tmp_path: Path) -> None:
    a = unrolled(tmp_path)
    with torch.no_grad():
        next(a.subject.model.parameters()).add_(1)
    query = [(letters.task().held_out.tensors[0][0],)]
    with pytest.raises(ValueError, match="away from the model"):
        a.score(query)
    run = a.exact.run
    a.fit("kfac").score(query)
    with pytest.raises(ValueError, match="method was 'kfac', is 'unroll'"):
        a.fit("unroll", run=run)


def test_an_unrolled_run_is_evaluated_with_its_own_batches(tmp_path: Path) -> None:
    def unused(*_: Any) -> nn.Module:
        raise AssertionError("an unrolled run retrains itself")

    results = evaluate(unrolled(tmp_path / "run"), unused, 4, subsets=12, fraction=0.95)
    assert results["same_batches"]
    assert results["lds"].keys() == {"gradients", "ekfac", "unroll"}
    assert results["lds"]["unroll"]["mean"] > 0.9


def test_unrolled_scores_are_compared_with_ekfac_without_retraining(tmp_path: Path) -> None:
    def unused(*_: Any) -> nn.Module:
        raise AssertionError("nothing is retrained")

    a = unrolled(tmp_path / "run")
    results = evaluate(a, unused, 4, subsets=0)
    assert results["lds"] == {}
    assert results["agreement"].keys() == {"gradients", "ekfac"}
    other = Attributor(tmp_path / "ekfac", a.subject.model, task=a.task).fit("ekfac")
    assert a.task is not None
    queries = [tuple(part[i] for part in a.task.held_out.tensors) for i in range(4)]
    scores = [run.score(queries, save=False) for run in (other, a)]
    expected = float(spearman(*scores).mean())
    assert results["agreement"]["ekfac"]["mean"] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="subsets must be at least 1 for a run that is not"):
        evaluate(other, unused, 4, subsets=0)


@pytest.mark.parametrize("name", ["adamw", "soap"])
def test_a_run_leaves_its_model_and_its_optimizer_as_they_are(name: str) -> None:
    task, ends = small_task(dead=False), []
    for unroll in (True, False):
        model = make_model(task, 0).eval()
        optimizer = (OPTIMIZERS | OPERATORS)[name](model)
        if unroll:
            task_run(task, model, optimizer, STEPS, 0).train()
            assert not model.training
        for numbers in batch_order(EXAMPLES, 6, 5, 0):
            losses(model, task.train.batch(numbers)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([param.detach() for param in model.parameters()])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
    with pytest.raises(ValueError, match="optimizer must be new"):
        task_run(task, model, optimizer, STEPS, 0)


def test_a_dropout_model_shared_with_its_run_is_queried_without_dropout(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    task = small_task(net)
    task = replace(task, train=Examples((task.train.tensors[0].float(), task.train.tensors[1])))
    model = make_model(task, 0)
    run = task_run(task, model, make_optimizer(model, 1e-2), STEPS, 0)
    train_(model, task, STEPS, 1e-2, 0)
    a = Attributor(tmp_path, model, task=task).fit("unroll", run=run)
    query = [(task.train.tensors[0][0], task.train.tensors[1][0])]
    first, second = (a.score(query, save=False) for _ in range(2))
    assert torch.equal(first, second)


def test_bad_arguments_of_a_run_are_named() -> None:
    run = run_of(OPTIMIZERS["sgd"])
    cases: list[tuple[str, dict[str, Any]]] = [
        ("order must have the indices", {"order": []}),
        ("order must have a tensor", {"order": [[0, 1]]}),
        ("order must have indices from 0 to 3", {"examples": 4}),
    ]
    for message, change in cases:
        with pytest.raises(ValueError, match=message):
            replace(run, **change)
    with pytest.raises(ValueError, match="segment must be a whole number"):
        run.scores(lambda params: params["0.weight"].sum()[None], segment=0)
    with pytest.raises(ValueError, match="weights must be one number for each"):
        run.train(torch.ones(3))
    model = make_model(small_task(), 0)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        task_run(small_task(), model, OPTIMIZERS["sgd"](model), 0, 0)
