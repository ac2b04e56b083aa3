"""Which part of Katie, Shampoo and SOAP does what: one setting changed at a time.

    python benchmarks/ablations.py [--task speeches-tiny,mnist-tiny,digits-tiny]

Every variant is trained with three learning rates on seed 0, with one more where the best is at the
edge, and at its best on two more seeds; one thread. Then Katie with correlation and with raw
statistics on the loss times 0.01 and 100, at the learning rate that was best at 1; convolutions of
CIFAR-10 as matrices (order=2) and with a factor per dimension (order=None); and learning rates of
the hidden matrices of llama-bpe, with 0.012 for everything else. Results are in
docs/benchmarks/ablations.json; what is there is not trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import packaged_data
import torch
from records import Records

from isokron.optimizers_by_name import resolve
from isokron.race.train import train
from isokron.tasks import Task, load

STEPS = {
    "speeches-tiny": 300,
    "mnist-tiny": 150,
    "digits-tiny": 100,
    "cifar10": 150,
    "llama-bpe": 350,
}
TASKS = ("speeches-tiny", "mnist-tiny", "digits-tiny")
LRS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # the middle three first
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
    "start 1": "katie(start=1)",
    "start 10": "katie(start=10)",
    "AdamW": "adamw",
    "Shampoo": "shampoo",
    "Shampoo, exponent 4": "shampoo(exponent=4)",
    "Shampoo, damping 1e-2": "shampoo(damping=1e-2)",
    "Shampoo, start 1": "shampoo(start=1)",
    "Shampoo, start 10": "shampoo(start=10)",
    "SOAP": "soap",
    "SOAP, graft None": "soap(graft=None)",
    "SOAP, start 1": "soap(start=1)",
    "SOAP, start 10": "soap(start=10)",
}
SCALES = (0.01, 1.0, 100.0)
HIDDEN_LRS, OTHER_LR = (6e-3, 1.2e-2), 1.2e-2
# what is in brackets is no longer there: its runs are read from the saved file
HIDDEN = ("shampoo", "soap", "soap [variances turned alone]")
CONVOLUTIONS = [(lr, name) for name in ("shampoo", "katie", "soap") for lr in (5e-3, 1e-2, 2e-2)]


def run(task: Task, spec: str, lr: float, seed: int, scale: float = 1.0) -> dict[str, Any]:
    """The final loss, divided by the number the loss was multiplied by; None: diverged."""
    scaled = replace(task, loss=lambda model, batch: scale * task.loss(model, batch))
    # before and after: only the final loss is compared
    result = train(scaled, resolve(spec), lr, seed, STEPS[task.name], evaluations=2)
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
        losses = {lr: final(spec, lr, 0) for lr in LRS[1:-1]}
        edge = min(losses, key=losses.__getitem__)
        if (beyond := {LRS[1]: LRS[0], LRS[-2]: LRS[-1]}.get(edge)) is not None:
            losses[beyond] = final(spec, beyond, 0)
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


def tables(tasks: Sequence[str] = TASKS) -> list[str]:
    """A row per variant; then the loss multiplied, and convolutions."""
    records = Records("ablations")
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
    return lines + convolutions(records) + hidden_rates(records)


def hidden_rates(records: Records) -> list[str]:
    """Rows of the final losses on llama-bpe, by the learning rate of hidden matrices."""
    heads = " | ".join(f"{lr:g}" for lr in HIDDEN_LRS)
    lines = ["", f"| llama-bpe | {heads} |", "|---" * (1 + len(HIDDEN_LRS)) + "|"]
    for name in HIDDEN:
        finals = []
        for lr in HIDDEN_LRS:
            spec = f"{name}(lr_scale={{'matrices':1.0,'*':{OTHER_LR / lr}}})"
            key = {"task": "llama-bpe", "optimizer": spec, "lr": lr, "seed": 0, "scale": 1.0}
            finals.append(records.once(partial(scaled_run, "llama-bpe", spec, lr, 1.0), **key))
        lines.append(f"| {name} | " + " | ".join(f"{run['final']:.3f}" for run in finals) + " |")
    # 75 steps, 64 windows, warm-up of a fifth, 0.012 for all: read from the saved file
    lines += ["", "| variances turned alone, and one change | |", "|---|---|"]
    runs = records.select(task="llama-bpe", steps=75)
    return lines + [f"| {run['change']} | {run['final']:.3f} |" for run in runs]


def convolutions(records: Records) -> list[str]:
    """Rows of the final losses on CIFAR-10 of convolutions as matrices, and by dimension."""
    lines = ["", "| | lr | order=2 | order=None |", "|---|---|---|---|"]
    for lr, name in CONVOLUTIONS:
        finals = []
        for spec in (name, f"{name}(order=None)"):
            key = {"task": "cifar10", "optimizer": spec, "lr": lr, "seed": 0, "scale": 1.0}
            finals.append(records.once(partial(cifar10_run, spec, lr), **key)["final"])
        lines.append(f"| {name} | {lr:g} | {finals[0]:.3f} | {finals[1]:.3f} |")
    return lines


def cifar10_run(spec: str, lr: float) -> dict[str, Any]:
    return run(packaged_data.image_task("cifar10"), spec, lr, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default=",".join(TASKS))
    parser.add_argument("--hidden", action="store_true", help="only the rates on llama-bpe")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.hidden:
        print("\n".join(hidden_rates(Records("ablations"))))
        return
    print("\n".join(tables(args.task.split(","))))


if __name__ == "__main__":
    main()
