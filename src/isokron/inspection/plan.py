"""What an inspection will do, checked before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isokron.curvature.fit import FISHERS, METHODS, SHARINGS
from isokron.tasks import Task, load

STEPS = 200


@dataclass(frozen=True)
class Plan:
    """steps: of training before the fit. damping: a multiple of a layer's mean eigenvalue.

    layers: patterns of names, all layers without.
    """

    task: Task
    steps: int
    lr: float
    seed: int
    weights: Path | None
    examples: int
    method: str
    fisher: str
    sharing: str
    layers: tuple[str, ...]
    damping: float


def make_plan(
    task: Task | str,
    *,
    steps: int | None = None,
    lr: float = 3e-3,
    seed: int = 0,
    weights: Path | str | None = None,
    examples: int = 512,
    method: str = "kfac",
    fisher: str = "empirical",
    sharing: str = "expand",
    layers: Sequence[str] = (),
    damping: float = 0.1,
) -> Plan:
    """Check all arguments and load the task. steps: by default 200, and 0 for given weights."""
    chosen = {"method": (method, METHODS), "fisher": (fisher, FISHERS)}
    for name, (value, choices) in {**chosen, "sharing": (sharing, SHARINGS)}.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    if steps is None:
        steps = 0 if weights is not None else STEPS
    for name, number, least in (("steps", steps, 0), ("examples", examples, 1), ("seed", seed, 0)):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be a positive number, got {lr:g}")
    if not (damping >= 0 and math.isfinite(damping)):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping:g}")
    path = None if weights is None else Path(weights)
    if path is not None and not path.is_file():
        raise ValueError(f"weights: no file {str(path)!r}; paths are relative to {Path.cwd()}")
    loaded = task if isinstance(task, Task) else load(task)
    if fisher != "empirical" and loaded.logits is None:
        raise ValueError(
            f"fisher {fisher!r} needs a task that says its logits, and {loaded.name!r} does not; "
            "give Task(logits=...), scores of classes and their targets, or use empirical"
        )
    return Plan(
        loaded,
        steps,
        lr,
        seed,
        path,
        min(examples, len(loaded.train)),
        method,
        fisher,
        sharing,
        tuple(layers),
        damping,
    )
