"""Bytes of optimizer state and final losses, in float32 and in fewer bits.

    python benchmarks/memory.py [--out docs/benchmarks/memory.json] [--seeds 3] [--print]

Trains every task with every optimizer by one thread, at one learning rate, and prints the tables of
docs/memory.md. Every run is written when it ends, so that a stopped benchmark goes on where it was;
--print only prints what there is.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import isokron
from isokron import tasks
from isokron.files import write_json
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
        made: torch.optim.Optimizer = optimizer(isokron.param_groups(model, **settings), lr=lr)
        return made

    return Entrant(f"{name}, {form}", build, (lr,))


def counted(task: str, name: str, form: str) -> int:
    """Bytes of state after one step."""
    model = tasks.load(task).model()
    optimizer = entrant(name, form).build(model, 1e-3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer_bytes(optimizer)


def planned(seeds: int) -> Iterable[tuple[str, str, str, int]]:
    """Task, optimizer, form and seed of every run."""
    for seed in range(seeds):
        for task in STEPS:
            for name in OPTIMIZERS:
                for form, (_, narrow) in FORMS.items():
                    if not narrow or (task in IN_BFLOAT16 and name != "Katie"):
                        yield task, name, form, seed


def measure(out: Path, seeds: int) -> None:
    """Run what is missing in a file."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    bytes_of = results.setdefault("bytes", {})
    losses = results.setdefault("losses", {})
    for case in product((MEASURED, *STEPS), OPTIMIZERS, ("float32", "small")):
        bytes_of[", ".join(case)] = counted(*case)
    write_json(out, results)
    loaded: dict[str, Task] = {}
    for task_name, name, form, seed in planned(seeds):
        key = f"{task_name}, {name}, {form}"
        if str(seed) in losses.setdefault(key, {}):
            continue
        task = loaded.setdefault(task_name, replace(tasks.load(task_name), sample=None))
        if FORMS[form][1]:
            task = replace(task, model=in_bfloat16(task.model))
        run = train(task, entrant(name, form), OPTIMIZERS[name][1], seed, STEPS[task_name])
        losses[key][str(seed)] = run.final
        print(f"{key}, seed {seed}: {run.final:.4f} {run.message or ''}", flush=True)
        write_json(out, results)


def tables(results: dict[str, Any]) -> str:
    """Markdown: bytes and losses of float32 and small state, and of bfloat16 parameters."""
    bytes_of, losses = results["bytes"], results["losses"]

    def loss(key: str) -> str:
        values = list(losses.get(key, {}).values())
        if not values:
            return "–"
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.4f}{spread} (n={len(values)})"

    columns = ("task", "optimizer", "MiB, float32", "small", "ratios to AdamW in float32")
    lines = [f"| {' | '.join(columns)} | loss, float32 | small |", "|---|---|---|---|---|---|---|"]
    for task in (MEASURED, *STEPS):
        for name in OPTIMIZERS:
            keys = [f"{task}, {name}, {form}" for form in ("float32", "small")]
            if not all(key in bytes_of for key in keys):
                continue
            sizes = [bytes_of[key] for key in keys]
            ratios = [size / bytes_of[f"{task}, AdamW, float32"] for size in sizes]
            cells = [f"{size / 2**20:.2f}" for size in sizes]
            cells += [f"{ratios[0]:.2f}, {ratios[1]:.2f}", *map(loss, keys)]
            lines.append(f"| {task} | {name} | {' | '.join(cells)} |")
    forms = ["float32", *(form for form, (_, narrow) in FORMS.items() if narrow)]
    lines += ["", f"| task | optimizer | {' | '.join(forms)} |", "|---|---|---|---|---|"]
    for task in IN_BFLOAT16:
        for name in ("AdamW", "SOAP"):
            cells = [loss(f"{task}, {name}, {form}") for form in forms]
            lines.append(f"| {task} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/memory.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--print", action="store_true", help="print the tables of a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.print:
        measure(options.out, options.seeds)
    print(tables(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()
