"""Scores refined by conjugate gradients against retrained models: quality and cost by steps.

    python benchmarks/refinement.py [--only minimum,logistic,mlp,digits] [--models FOLDER]
        [--subsets 50] [--queries 100]

"logistic" and "mlp" are MNIST as dattri 0.3.0 has it: the first 5,000 training images, logistic
regression by SGD (rate 0.01, 20 epochs) and a perceptron 784-128-64-10 with dropout 0.1 by SGD
(rate 0.01, momentum 0.9, 50 epochs), batches of 64. "minimum" is logistic regression trained to its
minimum (attribution_quality.py), "digits" the perceptron of lds.py with three models a subset. LDS
is the mean over queries of Spearman's ρ between summed scores of random halves and minus the losses
of models trained on them, with its standard error. Seconds are CPU time of `score`, without `fit`.
All runs are in docs/benchmarks/refinement.json.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import attribution_quality
import lds
import torch
from packaged_data import mnist_images
from records import Records
from torch import Tensor, nn

from isokron.attribution import Attributor, Query
from isokron.attribution.evaluate import lds_by_query, random_subsets, retrain
from isokron.tasks import Examples, Shown, Task
from isokron.tasks.digits import logits
from isokron.tasks.task import mean_cross_entropy

STEPS = (0, 2, 5, 10)
IMAGES, BATCH, RATE = 5000, 64, 0.01
MOST = 100  # queries whose losses are kept of every retrained model
SCORED = 500  # examples in a batch while scoring: products with G are matrix products of this size
Train = Callable[[Task, Tensor, int], nn.Module]


@dataclass(frozen=True)
class Study:
    """A task, how its models are trained, models a subset, and curvatures (method, fisher)."""

    task: Callable[[], Task]
    train: Train
    repeats: int
    fits: tuple[tuple[str, str], ...]
    dampings: tuple[float, ...] = (0.1, 1.0, 3.0, 10.0)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(64, 10),
    )


def mnist(model: Callable[[], nn.Module]) -> Task:
    """5,000 images of MNIST for training, 500 for queries."""

    def examples(part: str, count: int) -> Examples:
        images, labels = mnist_images(part)
        return Examples(((images[:count] - 0.1307) / 0.3081, labels[:count]))

    return Task(
        name="mnist",
        model=model,
        train=examples("train", IMAGES),
        evaluation=examples("test", 500),
        loss=mean_cross_entropy(logits),
        batch_size=BATCH,
        unit="cross-entropy",
        logits=logits,
    )


def by_sgd(task: Task, indices: Tensor, seed: int, *, epochs: int, momentum: float) -> nn.Module:
    torch.manual_seed(seed)
    model = task.model().train()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=momentum)
    for _ in range(epochs):
        for batch in indices[torch.randperm(len(indices))].split(BATCH):
            optimizer.zero_grad()
            task.losses(model, task.train.batch(batch)).mean().backward()
            optimizer.step()
    return model.eval()


K_FAC, EK_FAC = ("kfac", "empirical"), ("ekfac", "empirical")
EXACT = ("kfac", "exact"), ("ekfac", "exact")
STUDIES = {
    "minimum": Study(
        lambda: attribution_quality.linear_task("mnist"),
        attribution_quality.minimum,
        1,
        (K_FAC, EXACT[0]),
    ),
    "logistic": Study(lambda: mnist(linear), partial(by_sgd, epochs=20, momentum=0.0), 1, (K_FAC,)),
    "mlp": Study(
        lambda: mnist(perceptron),
        partial(by_sgd, epochs=50, momentum=0.9),
        1,
        (EXACT[1],),
        (100.0, 10.0),
    ),
    "digits": Study(lds.perceptron_task, lds.trained, 3, (EK_FAC, EXACT[1])),
}


def run_study(records: Records, name: str, models: Path, count: int, asked: int) -> None:
    study, start = STUDIES[name], time.perf_counter()
    task = study.task()
    everything = torch.arange(len(task.train))
    halves = random_subsets(count, len(everything))
    batches = [task.held_out.batch(torch.arange(MOST))]
    losses = retrain(models / name, task, study.train, halves, batches, repeats=study.repeats)
    losses = losses[:, :asked]
    print(f"{name}: {len(everything)} examples, retrained in {time.perf_counter() - start:.0f} s")
    model = study.train(task, everything, 0)
    queries = [
        Query(task.held_out.batch(torch.tensor([n])), (Shown(),), str(n)) for n in range(asked)
    ]

    def measured(attributor: Attributor, damping: float, refine: int) -> dict[str, Any]:
        start = time.process_time()
        scores = attributor.score(queries, damping=damping, refine=refine, save=False)
        seconds = time.process_time() - start
        values = lds_by_query(scores.as_subclass(Tensor), halves, losses)
        error = float(values.std()) / len(values) ** 0.5
        result = {"lds": round(float(values.mean()), 4), "error": round(error, 4)}
        residuals = {k: round(v, 5) for k, v in (scores.refinement or {}).items() if k != "steps"}
        return {**result, "seconds": round(seconds, 2), **residuals}

    if name == "minimum":
        run = attribution_quality.opened(task, model)
        scores = attribution_quality.hessian_scores(run, Examples(batches[0]))
        values = lds_by_query(scores[:asked], halves, losses)
        key = {"study": name, "method": "hessian", "subsets": count, "queries": asked}
        records.once(lambda: {"lds": round(float(values.mean()), 4)}, **key)
    for method, fisher in study.fits:
        folder = tempfile.mkdtemp()
        attributor = Attributor(folder, model, task=task, batch_size=SCORED, layers="*")
        attributor.fit(method, fisher=fisher)
        for damping in study.dampings:
            for refine in STEPS:
                key = {"study": name, "method": method, "fisher": fisher, "damping": damping}
                key |= {"refine": refine, "subsets": count, "queries": asked}
                records.once(partial(measured, attributor, damping, refine), **key)


def tables() -> list[str]:
    """LDS by study, curvature and damping, a column per number of steps; then the cost of steps."""
    records = Records("refinement")
    lines = ["| study | curvature | halves, queries | damping | fitted | 2 | 5 | 10 |"]
    lines.append("|---" * 8 + "|")
    keys = ("study", "method", "fisher", "subsets", "queries", "damping")
    costs: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    fits = [run for run in records.runs if "damping" in run]
    for key in dict.fromkeys(tuple(run[name] for name in keys) for run in fits):
        runs = records.select(**dict(zip(keys, key, strict=True)))
        by_steps = {run["refine"]: run for run in runs}
        cells = [f"{by_steps[n]['lds']:.4f}" if n in by_steps else "–" for n in (0, 2, 5, 10)]
        study, method, fisher, halves, queries, damping = key
        lines.append(f"| {study} | {method}, {fisher} | {halves}, {queries} | {damping:g} | "
                     f"{' | '.join(cells)} |")  # fmt: skip
        for run in runs:
            ratios = costs.setdefault((study, method, fisher), {}).setdefault(run["refine"], [])
            ratios.append(run["seconds"] / by_steps[0]["seconds"])
    lines += [
        "",
        "| CPU time, median over dampings | fitted | 2 | 5 | 10 |",
        "|---|---|---|---|---|",
    ]
    for names, ratios_by_steps in costs.items():
        medians = [statistics.median(ratios) for ratios in ratios_by_steps.values()]
        lines.append(f"| {', '.join(names)} | {' | '.join(f'{m:.1f}' for m in medians)} |")
    for study in dict.fromkeys(run["study"] for run in fits):
        errors = [run["error"] for run in fits if run["study"] == study]
        lines.append(f"| {study}, standard errors | {min(errors):.2f} to {max(errors):.2f} |")
    for run in records.select(method="hessian"):
        lines.append(f"| {run['study']}, the full Hessian | {run['lds']:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(STUDIES))
    parser.add_argument("--models", type=Path, help="folder of retrained models, to continue")
    parser.add_argument("--subsets", type=int, default=50)
    parser.add_argument("--queries", type=int, default=MOST, choices=range(1, MOST + 1))
    args = parser.parse_args()
    models = args.models or Path(tempfile.mkdtemp())
    records = Records("refinement")
    for name in args.only.split(","):
        run_study(records, name, models, args.subsets, args.queries)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
