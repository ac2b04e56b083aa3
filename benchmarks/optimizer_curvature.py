"""Curvature that an optimizer has anyway against fitted curvature: agreement with retrained models.

    python benchmarks/optimizer_curvature.py [--tasks digits,mnist] [--models FOLDER]
        [--subsets 30] [--queries 100]

A perceptron is trained by every optimizer, on all examples and on random halves of them; LDS is
that of lds.py. "digits": 1,437 images of 8×8, perceptron 64-64-64-10, 30 epochs; "mnist": 5,000
images, perceptron 784-128-64-10, 8 epochs; batches of 64, learning rate 1e-3. Scores are exact,
with curvature fitted to the data (K-FAC, EK-FAC, empirical Fisher), of gradients alone, and with
the optimizer's own state. "long" has decay rates of 0.999 in second moments and factors in place
of 0.95, so that they are means over about 1,000 batches. Runs: docs/benchmarks/
optimizer_curvature.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lds
import refinement
import torch
from records import Records
from torch import Tensor, nn

import isokron
from isokron.attribution import Attributor, Query
from isokron.attribution.evaluate import lds_by_query, random_subsets, retrain
from isokron.tasks import Shown, Task

RATE, BATCH = 1e-3, 64
DAMPINGS = (0.01, 0.1, 1.0)
LONG: dict[str, Any] = {"betas": (0.9, 0.999), "factor_beta": 0.999}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": isokron.AdamW,
    "Muon": isokron.Muon,
    "SOAP": isokron.SOAP,
    "Shampoo": isokron.Shampoo,
    "Katie": isokron.Katie,
    "SOAP long": partial(isokron.SOAP, **LONG),
    "Shampoo long": partial(isokron.Shampoo, **LONG),
    "Katie long": partial(isokron.Katie, **LONG),
}


def plain_perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


TASKS: dict[str, tuple[Callable[[], Task], int]] = {
    "digits": (lds.perceptron_task, 30),
    "mnist": (lambda: refinement.mnist(plain_perceptron), 8),
}


def trained(
    name: str, epochs: int, task: Task, indices: Tensor, seed: int
) -> tuple[nn.Module, Any]:
    """A model and the optimizer that has trained it."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = OPTIMIZERS[name](isokron.param_groups(model), RATE)
    for _ in range(epochs):
        for batch in indices[torch.randperm(len(indices))].split(BATCH):
            optimizer.zero_grad()
            task.losses(model, task.train.batch(batch)).mean().backward()
            optimizer.step()
    return model.eval(), optimizer


def only_model(name: str, epochs: int, task: Task, indices: Tensor, seed: int) -> nn.Module:
    return trained(name, epochs, task, indices, seed)[0]


def run_study(records: Records, data: str, name: str, models: Path, count: int, asked: int) -> None:
    make, epochs = TASKS[data]
    task = make()
    everything = torch.arange(len(task.train))
    halves = random_subsets(count, len(everything))
    batches = [task.held_out.batch(torch.arange(asked))]
    train = partial(only_model, name, epochs)
    start = time.perf_counter()
    losses = retrain(models / data / name, task, train, halves, batches)
    print(f"{data}, {name}: retrained in {time.perf_counter() - start:.0f} s", flush=True)
    model, optimizer = trained(name, epochs, task, everything, 0)
    queries = [
        Query(task.held_out.batch(torch.tensor([n])), (Shown(),), str(n)) for n in range(asked)
    ]

    def measured(curvature: str, damping: float) -> dict[str, Any]:
        attributor = Attributor(tempfile.mkdtemp(), model, task=task, batch_size=500, layers="*")
        start = time.perf_counter()
        if curvature == "optimizer":
            attributor.fit(optimizer=optimizer)
        elif curvature != "gradients":
            attributor.fit(curvature)
        seconds = time.perf_counter() - start
        scores = attributor.score(queries, damping=damping, save=False).as_subclass(Tensor)
        values = lds_by_query(scores, halves, losses)
        error = float(values.std()) / len(values) ** 0.5
        result = {"lds": round(float(values.mean()), 4), "error": round(error, 4)}
        return {**result, "fit_seconds": round(seconds, 2), "loss": round(float(losses.mean()), 4)}

    for curvature in ("gradients", "kfac", "ekfac", "optimizer"):
        if curvature == "optimizer" and name == "Muon":
            continue
        for damping in (0.1,) if curvature == "gradients" else DAMPINGS:
            key = {"task": data, "optimizer": name, "curvature": curvature, "damping": damping}
            key |= {"subsets": count, "queries": asked}
            records.once(partial(measured, curvature, damping), **key)


def tables() -> list[str]:
    """LDS at the best damping, a row per optimizer and a column per curvature."""
    records = Records("optimizer_curvature")
    lines = ["| task | optimizer | gradients | K-FAC | EK-FAC | its own |", "|---" * 6 + "|"]
    for task, name in dict.fromkeys((run["task"], run["optimizer"]) for run in records.runs):
        cells = []
        for curvature in ("gradients", "kfac", "ekfac", "optimizer"):
            runs = records.select(task=task, optimizer=name, curvature=curvature)
            best = max(runs, key=lambda run: run["lds"], default=None)
            cells.append(f"{best['lds']:.3f} ± {best['error']:.3f}" if best else "–")
        lines.append(f"| {task} | {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="separated by commas")
    parser.add_argument("--models", type=Path, help="folder of retrained models, to continue")
    parser.add_argument("--subsets", type=int, default=30)
    parser.add_argument("--queries", type=int, default=100)
    args = parser.parse_args()
    models = args.models or Path(tempfile.mkdtemp())
    records = Records("optimizer_curvature")
    for data in args.tasks.split(","):
        for name in args.optimizers.split(","):
            run_study(records, data, name, models, args.subsets, args.queries)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
