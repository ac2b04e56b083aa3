"""What a race will do, checked before it starts."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from isokron._version import __version__
from isokron.race.optimizers import YARDSTICK, Entrant, resolve
from isokron.tasks import Task, load

EVERY = "*"  # in a mapping of learning rates: all optimizers not named

Rates: TypeAlias = Sequence[float] | Mapping[str, Sequence[float]] | None


@dataclass(frozen=True)
class Plan:
    """sweeps: optimizer → learning rates; growing: optimizers whose sweep may be extended.

    shortest: look for the shortest schedules too. It changes no run of the race, so it is not
    among the settings: a race may be resumed with it or without.
    """

    task: Task
    entrants: tuple[Entrant, ...]
    sweeps: Mapping[str, tuple[float, ...]]
    growing: frozenset[str]
    steps: int
    seeds: int
    notes: tuple[str, ...] = ()
    shortest: bool = False


def make_plan(
    task: Task | str,
    optimizers: Iterable[str],
    steps: int,
    seeds: int,
    lrs: Rates = None,
    shortest: bool = False,
) -> Plan:
    """Check all arguments, add the yardstick, choose the learning rates."""
    for name, value in (("steps", steps), ("seeds", seeds)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    specs = list(dict.fromkeys(optimizers))
    notes = []
    if YARDSTICK not in specs:
        specs.insert(0, YARDSTICK)
        notes.append(f"{YARDSTICK} takes part as the yardstick")
    entrants = tuple(resolve(spec) for spec in specs)
    given = _given_rates(lrs, specs)
    loaded = task if isinstance(task, Task) else load(task)
    return Plan(
        loaded,
        entrants,
        {e.spec: given.get(e.spec, e.lrs) for e in entrants},
        frozenset(e.spec for e in entrants if e.spec not in given),
        steps,
        seeds,
        tuple(notes),
        shortest,
    )


def _given_rates(lrs: Rates, specs: Sequence[str]) -> dict[str, tuple[float, ...]]:
    if lrs is None:
        return {}
    named = dict(lrs) if isinstance(lrs, Mapping) else {EVERY: lrs}
    for spec, rates in named.items():
        if spec != EVERY and spec not in specs:
            raise ValueError(
                f"lr is given for {spec!r}, which does not take part; in the race are "
                f"{', '.join(specs)}"
            )
        wrong = [lr for lr in rates if not (lr > 0 and math.isfinite(lr))]
        if wrong or not rates:
            got = wrong[0] if wrong else "none"
            raise ValueError(f"lr must be positive numbers, got {got}; write for example 1e-3,3e-3")
    every = named.pop(EVERY, None)
    rates_of = dict.fromkeys(specs, every) if every is not None else {}
    return {spec: tuple(sorted(set(rates))) for spec, rates in {**rates_of, **named}.items()}


def settings(plan: Plan) -> dict[str, Any]:
    """All that the results depend on, as JSON; two races with equal settings may be joined."""
    import torch

    from isokron.race.schedule import digest

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = list(plan.task.model().state_dict().values())
        parameters = sum(p.numel() for p in plan.task.model().parameters())
    task = plan.task
    return {
        "task": task.name,
        "unit": task.unit,
        "steps": plan.steps,
        "seeds": plan.seeds,
        "optimizers": [entrant.spec for entrant in plan.entrants],
        "learning rates": {spec: list(lrs) for spec, lrs in plan.sweeps.items()},
        "sweep may grow": sorted(plan.growing),
        "schedule": "linear warm-up over the first tenth, then cosine to 0",
        "batch size": task.batch_size,
        "parameters": parameters,
        "training examples": len(task.train),
        "evaluation examples": len(task.evaluation),
        "fingerprint": digest([*task.train.tensors, *task.evaluation.tensors, *weights]),
        "torch": torch.__version__,
        "isokron": __version__,
        "threads": torch.get_num_threads(),
        "machine": machine(),
    }


def machine() -> str:
    """Processor and number of cores, without the host's name."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"
