"""Unrolled influence against retraining with 1 % of the examples dropped, beside other scores.

    python benchmarks/unroll.py [--cases digits,mnist] [--subsets 40] [--queries 20] [--skip times]

The model of a task is trained once. For every subset it is trained again with the same seed, the
same initial weights and the same batches, in which 1 % of the examples, drawn at random, have
weight 0: nothing but the weights differs, and no step is random. LDS is the mean over queries
(evaluation examples) of Spearman's ρ, over the subsets, of predicted with actual losses; ± is its
standard error over queries. `error` is the relative error of predicted changes of the loss,
‖predicted − actual‖ / ‖actual‖ over all subsets and queries, for scores that are in nats.

"sensitivity" is the change of a loss if weights change by no more than 1e-6: where it is not far
below the change by dropped examples, training amplifies rounding errors, and no score predicts it.

Times are process times of one thread, medians of interleaved rounds: of training as the command
line does it, and of the derivative (the recomputed steps and their reversal, without the first
training) for one query, for the mean of all queries, and for every query. "kept" is one query with
the graphs of all steps in memory: in the first call, whose memory is new, and in later calls.
Results are kept in docs/benchmarks/unroll.json; what is there is not computed again.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from records import Records
from timing import conditions
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.lr_scheduler import LambdaLR

import isokron
from isokron import tasks
from isokron.attribution.evaluate import lds_by_query, random_subsets
from isokron.attribution.queries import Query
from isokron.attribution.scorers import ExactScorer
from isokron.attribution.task_run import task_run
from isokron.attribution.unroll import TrainingRun
from isokron.optimizers_by_name import resolve
from isokron.tasks import Examples, Shown, Task
from isokron.training import batch_order, make_model, warmup_cosine

SEED, DROPPED = 0, 0.01


@dataclass(frozen=True)
class Case:
    """A training run: the task, its number of examples, the optimizer and its schedule.

    segment: steps whose graphs are kept at once; all of them for SOAP, since bases of equal
        eigenvalues differ by rotations when they are computed again.
    """

    task: str
    lr: float
    steps: int
    optimizer: str = "adamw"
    examples: int | None = None
    relu: bool = False
    segment: int | None = None


CASES = {
    "digits": Case("digits-tiny", 1e-3, 150),
    "mnist": Case("mnist-tiny", 1e-3, 150),
    "speeches": Case("speeches-tiny", 1e-3, 100, examples=1_000),
    "speeches-small": Case("speeches-small", 1e-3, 30, examples=1_000),
    "mnist-sgd": Case("mnist-tiny", 0.05, 150, "torch.optim:SGD(momentum=0.9)"),
    "sgd": Case("digits-tiny", 0.05, 150, "torch.optim:SGD(momentum=0.9)"),
    "muon": Case("digits-tiny", 1e-3, 150, "muon"),
    "muon-lr-0.01": Case("digits-tiny", 1e-2, 150, "muon"),
    "soap": Case("digits-tiny", 1e-3, 150, "soap", segment=150),
    "shampoo": Case("digits-tiny", 3e-3, 150, "shampoo(eps=1e-4,damping=0.01)"),
    "katie": Case("digits-tiny", 1e-3, 150, "katie"),
    "katie-lr-0.003": Case("digits-tiny", 3e-3, 150, "katie"),
    "katie-eps": Case("digits-tiny", 3e-3, 150, "katie(eps=1e-4)"),
    "lr-0.003-eps": Case("digits-tiny", 3e-3, 150, "adamw(eps=1e-4)"),
    "mnist-eps": Case("mnist-tiny", 1e-3, 150, "adamw(eps=1e-4)"),
    "mnist-muon": Case("mnist-tiny", 1e-3, 150, "muon"),
    "mnist-muon-lr-0.003": Case("mnist-tiny", 3e-3, 150, "muon"),
    "lr-0.003": Case("digits-tiny", 3e-3, 150),
    "lr-0.03": Case("digits-tiny", 3e-2, 150),
    "relu": Case("digits-tiny", 1e-3, 150, relu=True),
    "relu-lr-0.03": Case("digits-tiny", 3e-2, 150, relu=True),
}


class Study:
    """One case: its training run, queries, and the losses of retrained models."""

    def __init__(self, name: str, queries: int, count: int) -> None:
        self.name, self.case = name, CASES[name]
        self.task = loaded(self.case)
        numbers = torch.arange(queries)
        self.queries = [self.task.held_out.batch(number[None]) for number in numbers]
        self.together = self.task.held_out.batch(numbers)
        self.members = random_subsets(count, len(self.task.train), 1 - DROPPED, SEED)
        self.model = make_model(self.task, SEED)  # with initial weights

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return resolve(self.case.optimizer).build(model, self.case.lr)

    def run(self) -> TrainingRun:
        model = copy.deepcopy(self.model)
        return task_run(self.task, model, self.optimizer(model), self.case.steps, SEED)

    def losses(self, params: Any) -> Tensor:
        """Losses of the queries: [Q]"""
        bound = Losses(self.model, self.task)
        weights = {f"model.{name}": value for name, value in params.items()}
        values: Tensor = functional_call(bound, weights, (self.together,))
        return values

    def retrained(self, k: int) -> dict[str, Any]:
        with torch.no_grad():
            losses = self.losses(self.run().train(self.members[k].float()))
        return {"losses": losses.tolist()}

    def sensitivity(self) -> dict[str, Any]:
        """Median change of a query's loss where the weights of all examples differ by 1e-6."""
        changes = []
        with torch.no_grad():
            before = self.losses(self.run().train())
            for seed in range(3):
                generator = torch.Generator().manual_seed(seed)
                signs = torch.randint(0, 2, (len(self.task.train),), generator=generator) * 2 - 1
                after = self.losses(self.run().train(1 + 1e-6 * signs))
                changes.append((after - before).abs())
        return {"change": float(torch.stack(changes).median())}

    @cached_property
    def unrolled(self) -> Tensor:
        return self.run().scores(self.losses, segment=self.case.segment)

    def scores(self) -> dict[str, Tensor]:
        """[Q, N] by method."""
        trained = copy.deepcopy(self.model)
        trained.load_state_dict(self.run().train(), strict=False)
        asked = [Query(batch, (Shown(),), "") for batch in self.queries]
        with tempfile.TemporaryDirectory() as folder:
            a = isokron.Attributor(folder, trained, task=self.task).fit("ekfac")
            gradients = ExactScorer(a.subject, lambda damping: None)
            return {
                "unroll": self.unrolled,
                "ekfac": a.exact.scores(asked, 0.1, block=len(asked)).scores,
                "gradients": gradients.scores(asked, 0.1, block=len(asked)).scores,
            }

    def times(self, rounds: int = 5) -> dict[str, Any]:
        """Seconds of training, and of the derivative for one query, their mean, and all."""
        run, segment = self.run(), self.case.segment

        def one(params: Any) -> Tensor:
            return self.losses(params)[:1]

        def mean(params: Any) -> Tensor:
            return self.losses(params).mean()[None]

        contestants: dict[str, Callable[[], object]] = {
            "train": self.train_plainly,
            "functional": run.train,
            "unroll one": lambda: run.scores(one, segment=segment),
            "unroll mean": lambda: run.scores(mean, segment=segment),
            "unroll all": lambda: run.scores(self.losses, segment=segment),
        }
        turns = [{name: measured(f) for name, f in contestants.items()} for _ in range(rounds)]
        seconds = {name: median(turn[name] for turn in turns) for name in contestants}
        # last, since the memory that it frees is faster than new memory
        first, *later = (
            measured(lambda: run.scores(one, segment=self.case.steps)) for _ in range(rounds)
        )
        seconds |= {"kept first": first, "kept later": median(later)}
        for name in seconds.keys() - {"train", "functional"}:
            seconds[name] -= seconds["functional"]
        return {**seconds, "conditions": conditions()}

    def train_plainly(self) -> None:
        """Train with the optimizer itself, as in a race."""
        model, steps = copy.deepcopy(self.model), self.case.steps
        optimizer = self.optimizer(model)
        schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
        for indices in batch_order(len(self.task.train), self.task.batch_size, steps, SEED):
            self.task.losses(model, self.task.train.batch(indices)).mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


class Losses(nn.Module):
    """The losses of a task as a module, for `functional_call`."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> Tensor:
        return self.task.losses(self.model, batch)


def loaded(case: Case) -> Task:
    task = tasks.load(case.task)
    if case.examples is not None:
        rows = torch.arange(case.examples) * len(task.train) // case.examples
        train = Examples(task.train.batch(rows))
        task = replace(task, train=train, ids=[task.ids[row] for row in rows] if task.ids else ())
    if case.relu:
        build = task.model
        task = replace(task, model=lambda: with_relu(build()))
    return task


def with_relu(model: nn.Module) -> nn.Module:
    """The ConvNet of digits with ReLU in place of GELU after its convolutions."""
    assert isinstance(model.features, nn.Sequential)
    features = [nn.ReLU() if isinstance(part, nn.GELU) else part for part in model.features]
    model.features = nn.Sequential(*features)
    return model


def measured(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def evaluated(study: Study, records: Records, queries: int, count: int) -> dict[str, Any]:
    """LDS of all methods, and the relative error of predicted changes."""
    key = {"case": study.name, "queries": queries}
    runs = [records.once(partial(study.retrained, k), **key, subset=k) for k in range(count)]
    losses = torch.tensor([run["losses"] for run in runs], dtype=torch.float64)
    with torch.no_grad():
        before = study.losses(study.run().train()).double()
    result: dict[str, Any] = {"loss": float(before.mean())}
    scores = study.scores()
    for method, values in scores.items():
        lds = lds_by_query(values, study.members[:count], losses)
        result[method] = float(lds.mean())
        result[f"{method} ±"] = float(lds.std()) / len(lds) ** 0.5
    predicted = (scores["unroll"].double() @ (~study.members[:count]).double().mT).mT
    actual = losses - before
    result["error"] = float((predicted - actual).norm() / actual.norm())
    result["change"] = float(actual.abs().median())
    return result


def tables() -> list[str]:
    """LDS of the methods, a row per case; then times, also as multiples of one training."""
    records = Records("unroll")
    lines = ["| case | loss | unrolled | EK-FAC | gradients | error |", "|---" * 6 + "|"]
    for run in records.select(kind="quality"):
        case = CASES[run["case"]]
        label = f"{case.task}, {case.optimizer}, lr {case.lr:g}, {run['queries']} queries"
        cells = [f"{run[name]:.3f} ± {run[name + ' ±']:.3f}"
                 for name in ("unroll", "ekfac", "gradients")]  # fmt: skip
        lines.append(f"| {label}, {run['subsets']} subsets | {run['loss']:.4f} | "
                     f"{' | '.join(cells)} | {run['error']:.2f} |")  # fmt: skip
    lines += ["", "| case | training | one query | mean of queries | all | each further query "
              "| graphs kept, first call | later calls |", "|---" * 8 + "|"]  # fmt: skip
    for run in records.select(kind="times"):
        case, train = CASES[run["case"]], run["train"]
        run["further"] = (run["unroll all"] - run["unroll one"]) / (run["queries"] - 1)
        columns = ("unroll one", "unroll mean", "unroll all", "further", "kept first", "kept later")
        cells = [f"{run[name]:.2f} s, {run[name] / train:.1f} trainings" if name in run else ""
                 for name in columns]  # fmt: skip
        label = f"{case.task}, {case.steps} steps of {case.optimizer}, lr {case.lr:g}"
        lines.append(f"| {label}, {run['queries']} queries | {train:.2f} s | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="digits,mnist", help=f"of {', '.join(CASES)}")
    parser.add_argument("--subsets", type=int, default=40)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--skip", choices=["times", "quality"], help="do not measure this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(conditions())
    records = Records("unroll")
    for name in args.cases.split(","):
        study = Study(name, args.queries, args.subsets)
        size = {"case": name, "queries": args.queries}
        if args.skip != "times":
            records.once(study.times, **size, kind="times")
        if args.skip == "quality":
            continue
        quality = partial(evaluated, study, records, args.queries, args.subsets)
        records.once(quality, **size, kind="quality", subsets=args.subsets)
        records.once(study.sensitivity, **size, kind="sensitivity")
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
