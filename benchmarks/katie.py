"""Which part of Katie does what: one setting changed at a time, and the loss multiplied.

    python benchmarks/katie.py [--task speeches-tiny,mnist-tiny,digits-small]

Every variant is trained with three learning rates on seed 0 and, at its best, on two more seeds;
one thread. Then Katie with correlation and with raw statistics on the loss times 0.01 and 100, at
the learning rate that was best at 1. Results are in docs/benchmarks/katie.json; what is there is
not trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from records import Records

from isokron.optimizers_by_name import resolve
from isokron.race.train import train
from isokron.tasks import Task, load

STEPS = {"speeches-tiny": 300, "mnist-tiny": 150, "digits-small": 100}
LRS = (3e-3, 1e-2, 3e-2)
SEEDS = 3
VARIANTS = {
    "Katie as it is": "katie",
    "raw statistics": "katie(statistic='raw')",
    "symmetric form": "katie(form='symmetric')",
    "exponent 4": "katie(exponent=4)",
    "factor_beta 0.9": "katie(factor_beta=0.9)",
    "factor_beta 0.99": "katie(factor_beta=0.99)",
    "betas (0.9, 0.99)": "katie(betas=(0.9,0.99))",
    "graft adam": "katie(graft='adam')",
    "graft sgd": "katie(graft='sgd')",
    "every 1": "katie(every=1)",
    "every 100": "katie(every=100)",
    "damping 1e-4": "katie(damping=1e-4)",
    "damping 1e-3": "katie(damping=1e-3)",
    "damping 1e-1": "katie(damping=1e-1)",
    "damping 1": "katie(damping=1.0)",
    "AdamW": "adamw",
    "Shampoo": "shampoo",
    "SOAP": "soap",
}
SCALES = (0.01, 1.0, 100.0)


def run(task: Task, spec: str, lr: float, seed: int, scale: float = 1.0) -> dict[str, Any]:
    """The final loss, divided by the number the loss was multiplied by; None: diverged."""
    scaled = replace(task, loss=lambda model, batch: scale * task.loss(model, batch))
    result = train(scaled, resolve(spec), lr, seed, STEPS[task.name])
    if result.status == "failed":
        raise SystemExit(f"{task.name}, {spec}: {result.message}")
    final = result.final / scale
    return {"final": round(final, 5) if math.isfinite(final) else None}


def study(name: str, records: Records) -> dict[str, tuple[float, list[float]]]:
    """Variant → best learning rate, final losses over seeds."""
    outcome = {}

    def final(spec: str, lr: float, seed: int) -> float:
        key = {"task": name, "optimizer": spec, "lr": lr, "seed": seed, "scale": 1.0}
        record = records.once(lambda: run(load(name), spec, lr, seed), **key)
        return math.inf if record["final"] is None else record["final"]

    for label, spec in VARIANTS.items():
        losses = {lr: final(spec, lr, 0) for lr in LRS}
        best = min(losses, key=losses.__getitem__)
        outcome[label] = (best, [final(spec, best, seed) for seed in range(SEEDS)])
    for label in ("Katie as it is", "raw statistics"):
        spec, lr = VARIANTS[label], outcome[label][0]
        for scale in SCALES:
            key = {"task": name, "optimizer": spec, "lr": lr, "seed": 0, "scale": scale}
            records.once(partial(scaled_run, name, spec, lr, scale), **key)
    return outcome


def scaled_run(name: str, spec: str, lr: float, scale: float) -> dict[str, Any]:
    return run(load(name), spec, lr, 0, scale)


def tables(tasks: Sequence[str] = tuple(STEPS)) -> list[str]:
    """A row per variant; then the loss multiplied."""
    records = Records("katie")
    outcomes = {name: study(name, records) for name in tasks}
    lines = ["| | " + " | ".join(tasks) + " |", "|---" * (1 + len(tasks)) + "|"]
    for label in VARIANTS:
        cells = []
        for name in tasks:
            lr, finals = outcomes[name][label]
            cells.append(f"{statistics.fmean(finals):.4f} ± {statistics.stdev(finals):.4f} ({lr:g})"
                         if math.inf not in finals else "diverged")  # fmt: skip
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "| loss times | " + " | ".join(f"{scale:g}" for scale in SCALES) + " |"]
    lines.append("|---|---|---|---|")
    for name in tasks:
        for label in ("Katie as it is", "raw statistics"):
            spec, lr = VARIANTS[label], outcomes[name][label][0]
            key = {"task": name, "optimizer": spec, "lr": lr, "seed": 0}
            finals = [records.select(**key, scale=scale)[0]["final"] for scale in SCALES]
            cells = ["diverged" if final is None else f"{final:.4f}" for final in finals]
            lines.append(f"| {name}, {label} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default=",".join(STEPS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(tables(args.task.split(","))))


if __name__ == "__main__":
    main()
