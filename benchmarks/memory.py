"""Bytes of optimizer state and final losses, in float32 and in fewer bits.

    python benchmarks/memory.py [--task digits-tiny] [--seeds 3] [--print]

Trains every task with every optimizer by one thread, at one learning rate, and prints the tables of
docs/memory.md. Runs are in docs/benchmarks/memory.json, written after each; what is there is not
trained again. --print only prints what there is.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from records import Records
from torch import Tensor, nn
from torch.func import functional_call

import isokron
from isokron import tasks
from isokron.optimizers_by_name import Entrant
from isokron.race.train import optimizer_bytes, train
from isokron.tasks import Task

STEPS = {"digits-tiny": 200, "mnist-tiny": 150, "speeches-tiny": 300}
IN_BFLOAT16 = ("digits-tiny", "speeches-tiny")
MEASURED = "speeches-small"  # whose state is only counted
OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "AdamW": (isokron.AdamW, 3e-3),
    "SOAP": (isokron.SOAP, 1e-2),
    "Katie": (isokron.Katie, 1e-2),
}
SMALL = {"moments": "8bit", "factor_dtype": "8bit"}
# form → settings, whether parameters are in bfloat16
FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "float32": ({}, False),
    "small": (SMALL, False),
    "bfloat16, nearest": ({"state_dtype": torch.float32}, True),
    "bfloat16, stochastic": ({"state_dtype": torch.float32, "rounding": "stochastic"}, True),
}


class InFloat32(nn.Module):
    """A model whose parameters are in bfloat16, and whose products are in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.bfloat16()

    def forward(self, *inputs: Tensor) -> Any:
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        wide = {k: v.float() if v.is_floating_point() else v for k, v in tensors}
        return functional_call(self.model, wide, inputs)


def in_bfloat16(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: InFloat32(make())


def entrant(name: str, form: str) -> Entrant:
    """An optimizer by its name here."""
    optimizer, lr = OPTIMIZERS[name]
    settings = FORMS[form][0]
    if name == "AdamW":  # which has no factors
        settings = {key: value for key, value in settings.items() if key != "factor_dtype"}

    def build(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        built: torch.optim.Optimizer = optimizer(isokron.param_groups(model, **settings), lr=lr)
        return built

    return Entrant(f"{name}, {form}", build, lr)


def counted(task: str, optimizer: str, form: str) -> dict[str, int]:
    """Bytes of state after one step."""
    model = load(task).model()
    built = entrant(optimizer, form).build(model, 1e-3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    built.step()
    return {"bytes": optimizer_bytes(built)}


@cache
def load(name: str) -> Task:
    return replace(tasks.load(name), sample=None)


def trained(task: str, optimizer: str, form: str, seed: int) -> dict[str, float]:
    """The final evaluation loss."""
    narrow = FORMS[form][1]
    loaded = replace(load(task), model=in_bfloat16(load(task).model)) if narrow else load(task)
    run = train(loaded, entrant(optimizer, form), OPTIMIZERS[optimizer][1], seed, STEPS[task])
    return {"final": run.final}


def planned(names: Iterable[str], seeds: int) -> Iterable[dict[str, Any]]:
    """Task, optimizer, form and seed of every run."""
    for seed, task, name in product(range(seeds), names, OPTIMIZERS):
        for form, (_, narrow) in FORMS.items():
            if not narrow or (task in IN_BFLOAT16 and name != "Katie"):
                yield {"task": task, "optimizer": name, "form": form, "seed": seed}


def measure(names: Iterable[str], seeds: int) -> None:
    """Run what is missing in the records."""
    records = Records("memory")
    counts = [run for run in records.runs if "bytes" in run]
    for task, name, form in product((MEASURED, *names), OPTIMIZERS, ("float32", "small")):
        size_of = {"task": task, "optimizer": name, "form": form}
        if not any(size_of.items() <= run.items() for run in counts):
            records.runs.append({**size_of, **counted(task, name, form)})
    for key in planned(names, seeds):
        records.once(partial(trained, **key), **key)


def tables() -> list[str]:
    """Markdown: bytes and losses of float32 and small state, and of bfloat16 parameters."""
    records = Records("memory")

    def of_size(task: str, name: str, form: str) -> int | None:
        runs = records.select(task=task, optimizer=name, form=form)
        return next((run["bytes"] for run in runs if "bytes" in run), None)

    def loss(task: str, name: str, form: str) -> str:
        runs = records.select(task=task, optimizer=name, form=form)
        values = [run["final"] for run in runs if "final" in run]
        if not values:
            return "–"
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.4f}{spread} (n={len(values)})"

    columns = ("task", "optimizer", "MiB, float32", "small", "ratios to AdamW in float32")
    lines = [f"| {' | '.join(columns)} | loss, float32 | small |", "|---|---|---|---|---|---|---|"]
    for task, name in product((MEASURED, *STEPS), OPTIMIZERS):
        sizes = [of_size(task, name, form) for form in ("float32", "small")]
        adamw = of_size(task, "AdamW", "float32")
        if adamw is None or sizes[0] is None or sizes[1] is None:
            continue
        cells = [f"{size / 2**20:.2f}" for size in sizes if size is not None]
        cells.append(", ".join(f"{size / adamw:.2f}" for size in sizes if size is not None))
        cells += [loss(task, name, form) for form in ("float32", "small")]
        lines.append(f"| {task} | {name} | {' | '.join(cells)} |")
    for name in OPTIMIZERS:
        finals = {form: {(run["task"], run["seed"]): run["final"]
                         for run in records.select(optimizer=name, form=form) if "final" in run}
                  for form in ("float32", "small")}  # fmt: skip
        both = finals["float32"].keys() & finals["small"].keys()
        change = max((abs(finals["small"][k] - finals["float32"][k]) for k in both), default=0.0)
        lines.append(f"{name}: losses of a seed differ by at most {change:.4f}")
    forms = ["float32", *(form for form, (_, narrow) in FORMS.items() if narrow)]
    lines += ["", f"| task | optimizer | {' | '.join(forms)} |", "|---|---|---|---|---|"]
    for task, name in product(IN_BFLOAT16, ("AdamW", "SOAP")):
        cells = [loss(task, name, form) for form in forms]
        lines.append(f"| {task} | {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default=",".join(STEPS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--print", action="store_true", help="print the tables of the records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.print:
        measure(options.task.split(","), options.seeds)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
