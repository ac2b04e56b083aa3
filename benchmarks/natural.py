"""Ablation of NaturalGradient: Woodbury policy, damping and bound on condition numbers.

    python benchmarks/natural.py [--steps 60] [--lr 0.01] [--task NAME,NAME]

Every setting trains the same model on the same batches, from one seed: the classifier of
digits-tiny and the byte-level transformer of speeches-tiny. The table has the final evaluation
loss, the mean CPU time of a step (model and optimizer, one thread) as a ratio to AdamW's in the
same run, the memory of statistics and bases, and the share of eigenvalues that max_condition has
lifted at the end.
"""

import argparse
import logging
import math
import operator
import statistics
import time
from typing import Any

import torch
from records import recorded
from timing import conditions
from torch.optim.lr_scheduler import LambdaLR

from isokron.optimizers_by_name import resolve
from isokron.tasks.catalog import load
from isokron.training import batch_order, evaluation_loss, make_model, warmup_cosine

ADAMW_LR = 1e-2
UNTIMED = 3  # first steps, which pay for allocation and refresh in a row
SETTINGS = (
    "natural",
    'natural(policy="auto")',
    'natural(policy="all")',
    'natural(policy="all",t_max=128)',
    'natural(method="tkfac")',
    'natural(method="ekfac")',
    "natural(damping=1e-2)",
    "natural(damping=1e-4)",
    "natural(damping=1e-4,max_condition=1e2)",
    "natural(damping=1e-4,max_condition=1e4)",
    "natural(damping=1e-6)",
    "natural(damping=1e-6,max_condition=1e4)",
)


def measured(task: Any, spec: str, lr: float, steps: int) -> dict[str, float]:
    """Final loss, CPU seconds a step, bytes of statistics and the clipped share of one setting."""
    model = make_model(task, 0)
    optimizer: Any = resolve(spec).build(model, lr)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    seconds = []
    try:
        for indices in batch_order(len(task.train), task.batch_size, steps, 0):
            model.train()
            batch = task.train.batch(indices)
            start = time.process_time()  # not that of what else runs on the cores
            optimizer.zero_grad()
            task.losses(model, batch).mean().backward()
            optimizer.step()
            seconds.append(time.process_time() - start)
            schedule.step()
        loss = evaluation_loss(model, task)
    except FloatingPointError:
        loss = math.inf
    records = optimizer.report() if hasattr(optimizer, "report") else []
    sizes = [record["outputs"] * record["inputs"] * record["blocks"] for record in records]
    shares = [record.get("clipped", 0.0) for record in records]
    return {
        "loss": loss,
        "seconds": statistics.mean(seconds[UNTIMED:]),
        "bytes": float(sum(record["bytes"] for record in records)),
        "clipped": sum(map(operator.mul, sizes, shares)) / max(1, sum(sizes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="Training steps of every setting.")
    parser.add_argument("--lr", type=float, default=1e-2, help="Learning rate of NaturalGradient.")
    parser.add_argument("--task", default="digits-tiny,speeches-tiny", help="Comma-separated.")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with recorded("natural"):
        print(f"{conditions()}; {options.steps} steps, lr {options.lr:g}, AdamW lr {ADAMW_LR:g}\n")
        for name in options.task.split(","):
            task = load(name)
            print(f"| {name} | final loss | step, × AdamW | statistics, MB | clipped |")
            print("|---|---|---|---|---|")
            yardstick = measured(task, "adamw", ADAMW_LR, options.steps)
            print(f"| adamw | {yardstick['loss']:.4f} | 1 | – | – |")
            for spec in SETTINGS:
                row = measured(task, spec, options.lr, options.steps)
                ratio = row["seconds"] / yardstick["seconds"]
                shares = f"{row['bytes'] / 1e6:.2f} | {row['clipped']:.1%}"
                print(f"| `{spec}` | {row['loss']:.4f} | {ratio:.2f} | {shares} |", flush=True)
            print()


if __name__ == "__main__":
    main()
