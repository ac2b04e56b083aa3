"""Ablation of NaturalGradient: policies, damping, condition numbers, reductions over ranks.

    python benchmarks/natural.py [--steps 60] [--lr 0.01] [--task NAME,NAME] [--ranks 2] [--heads]

Every setting trains the same model on the same batches, from one seed: the classifier of
digits-tiny and the byte-level transformer of speeches-tiny. The table has the final evaluation
loss, the mean CPU time of a step (model and optimizer, one thread) as a ratio to AdamW's in the
same run, the memory of statistics and bases, the share of eigenvalues that max_condition has
lifted at the end, and the largest condition number of a layer after damping. With --ranks, each of
so many processes has its part of every batch, and the table compares ways of
`distribute(reduce=…)` by how far the weights end from those of one process. With --heads, the table
has the median step of 20 and the longest of wide layers with policy="auto".
"""

import argparse
import logging
import math
import multiprocessing
import operator
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from records import recorded
from timing import conditions
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import isokron
from isokron.optimizers_by_name import resolve
from isokron.tasks.catalog import load
from isokron.training import batch_order, evaluation_loss, make_model, warmup_cosine

ADAMW_LR = 1e-2
UNTIMED = 3  # first steps, which pay for allocation and refresh in a row
DAMPINGS = ("1e-5", "3e-5", "1e-4", "3e-4", "1e-3", "1e-2")
CONDITIONS = ("1e4", "1e5", "3e5", "1e6", "3e6", "1e7")
SETTINGS = (
    "natural",
    *(f'natural(policy="{policy}")' for policy in ("all", "auto", "hybrid")),
    'natural(policy="auto",t_max=32)',
    'natural(policy="all",t_max=128)',
    'natural(method="tkfac")',
    'natural(method="ekfac")',
    'natural(method="ekfac",policy="auto",t_max=32)',
    *(f"natural(damping={damping})" for damping in DAMPINGS),
    *(f"natural(damping=1e-6,max_condition={condition})" for condition in CONDITIONS),
)
HEADS = ((16, 4_000), (16, 9_000), (64, 50_257))
REDUCTIONS = ("covariance", "gather", "gram", "none")
REDUCED: tuple[dict[str, Any], ...] = ({}, {"policy": "all"}, {"policy": "all", "t_max": 32})


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
        "seconds": statistics.mean(seconds[UNTIMED:] or seconds[-1:]),
        "condition": max((record.get("condition_after", 1.0) for record in records), default=1.0),
        "bytes": float(sum(record["bytes"] for record in records)),
        "clipped": sum(map(operator.mul, sizes, shares)) / max(1, sum(sizes)),
    }


def compare_reductions(ranks: int, task_name: str, steps: int, lr: float) -> None:
    """Print how far each reduction ends from one process, and its CPU time on rank 0."""
    spawn = multiprocessing.get_context("spawn")
    rows: Any = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"file://{folder}/store", task_name, steps, lr, rows)
        processes = [spawn.Process(target=reduce_, args=(i, *arguments)) for i in range(ranks)]
        for process in processes:
            process.start()
        for settings in REDUCED:
            for reduction in REDUCTIONS:
                distance, seconds = rows.get(timeout=600)
                shown = ",".join(f"{name}={value!r}" for name, value in settings.items())
                print(
                    f"| `natural({shown})` | {reduction} | {distance:.1e} | {1e3 * seconds:.1f} |"
                )
        for process in processes:
            process.join()


def reduce_(
    rank: int, ranks: int, store: str, task_name: str, steps: int, lr: float, rows: Any
) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store, world_size=ranks, rank=rank)
    task = load(task_name)
    for settings in REDUCED:
        alone, _ = trained(task, settings, None, steps, lr)
        norm = math.hypot(*(float(param.norm()) for param in alone))
        for reduction in REDUCTIONS:
            params, seconds = trained(task, settings, reduction, steps, lr)
            pairs = zip(params, alone, strict=True)
            distance = math.hypot(*(float((one - other).norm()) for one, other in pairs))
            if rank == 0:
                rows.put((distance / norm, seconds / steps))
    dist.destroy_process_group()


def trained(
    task: Any, settings: dict[str, Any], reduction: str | None, steps: int, lr: float
) -> tuple[list[Tensor], float]:
    """Weights in float64 and CPU seconds, of all ranks together; for None of each on all data."""
    model = make_model(task, 0).double()
    optimizer = isokron.NaturalGradient(model, lr, reduction="global_mean", **settings)
    rank, ranks = 0, 1
    if reduction is not None:
        optimizer.distribute(reduce=reduction)
        rank, ranks = dist.get_rank(), dist.get_world_size()
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone among several
        for indices in batch_order(len(task.train), task.batch_size, steps, 0):
            batch = task.train.batch(indices[rank::ranks])
            batch = tuple(x.double() if x.is_floating_point() else x for x in batch)
            optimizer.zero_grad()
            (task.losses(model, batch).sum() * ranks / len(indices)).backward()
            for param in model.parameters() if ranks > 1 else ():
                if param.grad is not None:
                    dist.all_reduce(param.grad.div_(ranks))
            optimizer.step()
    return [param.detach() for param in model.parameters()], time.process_time() - start


def wide_heads() -> None:
    """CPU time of the steps of one wide layer, on batches of 64."""
    print("| inputs → outputs | method | median step, s | longest | state, MB |")
    print("|---|---|---|---|---|")
    for inputs, outputs in HEADS:
        for method in ("kfac", "ekfac"):
            torch.manual_seed(0)
            head = nn.Linear(inputs, outputs)
            optimizer = isokron.NaturalGradient(head, policy="auto", method=method, every=1000)
            seconds = []
            for _ in range(20):
                optimizer.zero_grad()
                logits = head(torch.randn(64, inputs))
                nn.functional.cross_entropy(logits, torch.randint(outputs, (64,))).backward()
                start = time.process_time()
                optimizer.step()
                seconds.append(time.process_time() - start)
            median, size = statistics.median(seconds), optimizer.report()[0]["bytes"] / 1e6
            shown = f"{median:.3f} | {max(seconds) / median:.1f} × | {size:.0f}"
            print(f"| {inputs} → {outputs:,} | `{method}` | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="Training steps of every setting.")
    parser.add_argument("--lr", type=float, default=1e-2, help="Learning rate of NaturalGradient.")
    parser.add_argument("--task", default="digits-tiny,speeches-tiny", help="Comma-separated.")
    parser.add_argument("--ranks", type=int, help="Compare reductions over so many processes.")
    parser.add_argument("--heads", action="store_true", help="Time the steps of wide layers.")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with recorded("natural"):
        if options.heads:
            print(f"{conditions()}\n")
            wide_heads()
            return
        print(f"{conditions()}; {options.steps} steps, lr {options.lr:g}, AdamW lr {ADAMW_LR:g}\n")
        for name in options.task.split(","):
            if options.ranks:
                print(f"| {name} | reduction | distance from one process | CPU, ms a step |")
                print("|---|---|---|---|", flush=True)
                compare_reductions(options.ranks, name, options.steps, options.lr)
                continue
            task = load(name)
            print(f"| {name} | final loss | step, × AdamW | statistics, MB | clipped | κ damped |")
            print("|---|---|---|---|---|---|")
            yardstick = measured(task, "adamw", ADAMW_LR, options.steps)
            print(f"| adamw | {yardstick['loss']:.4f} | 1 | – | – | – |")
            for spec in SETTINGS:
                row = measured(task, spec, options.lr, options.steps)
                ratio = row["seconds"] / yardstick["seconds"]
                shares = f"{row['bytes'] / 1e6:.2f} | {row['clipped']:.1%} | {row['condition']:.1g}"
                print(f"| `{spec}` | {row['loss']:.4f} | {ratio:.2f} | {shares} |", flush=True)
            print()


if __name__ == "__main__":
    main()
