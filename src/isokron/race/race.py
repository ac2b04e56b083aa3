"""A race from its checks to its result: round after round, the missing runs are trained."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch

from isokron._version import __version__
from isokron.optimizers_by_name import YARDSTICK, Entrant, resolve
from isokron.race import results, train
from isokron.race.page import write_reports
from isokron.race.results import Key, Result, Run
from isokron.race.run_files import race_folder, read_runs, write_run
from isokron.tasks import Task, load
from isokron.training import Progress, digest, make_model, silent

EVERY = "*"  # in a mapping of learning rates: all optimizers not named
EXTENSIONS = 2  # of a sweep whose best learning rate lies at an edge
FACTOR = 3.0  # between neighbours in an extended sweep

Sweeps: TypeAlias = Mapping[str, Sequence[float]]  # optimizer → learning rates
Rates: TypeAlias = Sequence[float] | Sweeps | None
Rounds: TypeAlias = Iterator[tuple[Iterable[Key], str]]  # runs to be trained, and why


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a race; `result` holds the runs that were finished."""

    def __init__(self, result: Result) -> None:
        super().__init__("race interrupted")
        self.result = result


@dataclass
class Race:
    """A race whose arguments have been checked. growing: optimizers whose sweep may be extended."""

    task: Task
    entrants: Mapping[str, Entrant]
    sweeps: Sweeps
    growing: Collection[str]
    steps: int
    seeds: int
    # changes no run of the race, so it is not among the settings: a race may be resumed with or
    # without the search for the shortest schedules
    shortest: bool = False

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that the results depend on, as JSON; two races with equal settings may be joined."""
        task, model = self.task, make_model(self.task, 0)
        tensors = [*task.train.tensors, *task.held_out.tensors, *model.state_dict().values()]
        return {
            "task": task.name,
            "unit": task.unit,
            "steps": self.steps,
            "seeds": self.seeds,
            "optimizers": list(self.sweeps),
            "learning rates": {spec: list(lrs) for spec, lrs in self.sweeps.items()},
            "sweep may grow": sorted(self.growing),
            "schedule": "linear warm-up over the first tenth, then cosine to 0",
            "batch size": task.batch_size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "training examples": len(task.train),
            "evaluation examples": len(task.held_out),
            "fingerprint": digest(tensors),
            "torch": torch.__version__,
            "isokron": __version__,
            "threads": torch.get_num_threads(),
            "machine": machine(),
        }


def run(
    task: Task | str,
    optimizers: Iterable[str] = ("adamw", "muon"),
    *,
    steps: int = 300,
    seeds: int = 2,
    lrs: Rates = None,
    shortest: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> Result:
    """Race optimizers on a task; `adamw` always takes part.

    Args:
        task: a Task, or the name of one as for `isokron race --task`.
        optimizers: names of built-in ones, or `module:name`, with options in parentheses.
        steps: length of a run.
        seeds: runs per learning rate.
        lrs: learning rates for all, or optimizer → learning rates ("*" for the others). By default
            each optimizer has its own sweep, which grows while its best value lies at an edge.
        shortest: also find the shortest schedule with which each optimizer reaches AdamW's loss.
        out: folder for the files and the page; None writes nothing.
        resume: continue the race in `out`.
        progress: called with (stage, steps done, steps in total, note).
    """
    race = prepare(task, optimizers, steps, seeds, lrs, shortest)
    if out is None:
        return execute(race, None, progress)
    with race_folder(Path(out), race.settings, resume):
        return execute(race, Path(out), progress)


def prepare(
    task: Task | str,
    optimizers: Iterable[str],
    steps: int,
    seeds: int,
    lrs: Rates = None,
    shortest: bool = False,
) -> Race:
    """Check all arguments, add the yardstick, choose the learning rates."""
    for name, value in (("steps", steps), ("seeds", seeds)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    specs = list(optimizers)
    specs = specs if YARDSTICK in specs else [YARDSTICK, *specs]
    entrants = {spec: resolve(spec) for spec in specs}
    rates = _rates(lrs, entrants)
    loaded = task if isinstance(task, Task) else load(task)
    sweeps = {spec: rates.get(spec, entrant.lrs) for spec, entrant in entrants.items()}
    return Race(loaded, entrants, sweeps, entrants.keys() - rates.keys(), steps, seeds, shortest)


def _rates(lrs: Rates, specs: Collection[str]) -> dict[str, tuple[float, ...]]:
    """Optimizer → the learning rates asked for, of those that have any."""
    named = {} if lrs is None else dict(lrs) if isinstance(lrs, Mapping) else {EVERY: lrs}
    for spec, rates in named.items():
        if spec not in (EVERY, *specs):
            present = f"in the race are {', '.join(specs)}"
            raise ValueError(f"lr is given for {spec!r}, which does not take part; {present}")
        wrong = [lr for lr in rates if not (lr > 0 and math.isfinite(lr))]
        if wrong or not rates:
            value = wrong[0] if wrong else "none"
            raise ValueError(f"lr must be positive numbers, got {value}; write 1e-3,3e-3")
    default = named.pop(EVERY, ())
    chosen = {**dict.fromkeys(specs, default), **named}
    return {spec: tuple(sorted(set(rates))) for spec, rates in chosen.items() if rates}


def machine() -> str:
    """Processor and number of cores, without the host's name."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def execute(race: Race, folder: Path | None = None, progress: Progress = silent) -> Result:
    """Train the missing runs and write the reports, after Ctrl-C too, which is raised again.

    folder: held by `race_folder`, or None to write nothing.
    """
    # a failed run is tried again: what made the optimizer fail may have been repaired
    saved = [] if folder is None else [r for r in read_runs(folder) if r.status != "failed"]
    done = {run.key: run for run in saved}
    sweeps = {spec: list(lrs) for spec, lrs in race.sweeps.items()}
    probes = probe_rounds(race, sweeps, done) if race.shortest else ()
    total = 0
    try:
        for keys, why in chain(sweep_rounds(race, sweeps, done), probes):
            missing = [key for key in keys if key not in done]
            if missing and why:
                progress(f"{len(missing)} more runs: {why}", 0, 0)
            first, total = total + 1, total + len(missing)
            for number, key in enumerate(missing, start=first):
                if key.optimizer not in failed(done):
                    # entered before it is written: Ctrl-C in between must not hide what is on disk
                    done[key] = _train(race, key, f"run {number} of {total}", progress)
                    if folder is not None:
                        write_run(folder, done[key])
        complete = True
    except KeyboardInterrupt:
        complete = False
    result = _conclude(race, sweeps, done, complete)
    if folder is not None:
        write_reports(result, folder)
    if not complete:
        raise Interrupted(result)
    return result


def _train(race: Race, key: Key, number: str, progress: Progress) -> Run:
    steps = key.schedule or race.steps
    length = "" if key.schedule is None else f", {steps} steps"
    stage = f"{number}, {key.optimizer}, lr {key.lr:g}, seed {key.seed}{length}"

    def on_step(step: int, loss: float) -> None:
        # after the last one follows the evaluation loss
        if step < steps:
            progress(stage, step, steps, f"training loss {loss:.4g}")

    entrant = race.entrants[key.optimizer]
    run = train.train(race.task, entrant, key.lr, key.seed, steps, on_step)
    count = len(run.train_losses)
    final = f"final loss {run.final:.4f}" if run.status == "finished" else run.status
    progress(stage, count, count, final)
    return replace(run, schedule=key.schedule)


def _conclude(race: Race, sweeps: Sweeps, done: Mapping[Key, Run], complete: bool) -> Result:
    runs = tuple(run for run in done.values() if run.schedule is None)
    probes = tuple(run for run in done.values() if run.schedule is not None)
    standings = results.summarize(runs, sweeps, race.seeds)
    # earlier searches are shown, asked for or not
    searched = race.shortest or bool(probes)
    if searched:
        standings = results.with_shortest(standings, probes, race.steps, race.seeds)
    return Result(race.settings, runs, standings, complete, probes, searched)


def failed(done: Mapping[Key, Run]) -> set[str]:
    """Optimizers that raised; they are not trained any further."""
    return {run.optimizer for run in done.values() if run.status == "failed"}


def interleaved(sweeps: Sweeps, seeds: int) -> Iterator[Key]:
    """Runs by seed, then by position in the sweep, then by optimizer."""
    # optimizers take turns, so that a slow minute of the machine hits all alike
    for seed in range(seeds):
        for lrs in zip_longest(*sweeps.values()):
            yield from (Key(s, lr, seed) for s, lr in zip(sweeps, lrs, strict=True) if lr)


def next_lr(finals: Mapping[float, float]) -> float | None:
    """The learning rate to try next: beyond the edge at which the best lies, if it lies there.

    finals: learning rate → mean final loss, infinite where it diverged.
    """
    best = results.best_lr(finals)
    # smaller also if all diverged
    if best is None or best == min(finals):
        return float(f"{min(finals) / FACTOR:.3g}")
    return float(f"{max(finals) * FACTOR:.3g}") if best == max(finals) else None


def sweep_rounds(race: Race, sweeps: dict[str, list[float]], done: Mapping[Key, Run]) -> Rounds:
    """The sweeps as planned, then their extensions, which are appended to `sweeps`."""
    yield interleaved(sweeps, race.seeds), ""
    for _ in range(EXTENSIONS):
        extended = {}
        for spec, lrs in sweeps.items():
            finals = results.sweep([r for r in done.values() if r.key[::3] == (spec, None)])
            lr = next_lr({lr: finals.get(lr, math.inf) for lr in lrs})
            if spec in race.growing and lr is not None and spec not in failed(done):
                extended[spec] = [lr]
                lrs.append(lr)
        yield interleaved(extended, race.seeds), "the best learning rate is at an edge of the sweep"


def probe_rounds(race: Race, sweeps: Sweeps, done: Mapping[Key, Run]) -> Rounds:
    """After the race: every optimizer on the length its search tries next, till all are over."""
    runs = [run for run in done.values() if run.schedule is None]
    standings = results.summarize(runs, sweeps, race.seeds)
    while True:
        states = results.searches(standings, list(done.values()), race.steps, race.seeds)
        lengths = {spec: n for spec, (_, n) in states.items() if n and spec not in failed(done)}
        if not lengths:
            return
        rates = {s.optimizer: [s.best_lr or 0.0] for s in standings if s.optimizer in lengths}
        keys = interleaved(rates, race.seeds)
        shorter = [key._replace(schedule=lengths[key.optimizer]) for key in keys]
        yield shorter, "looking for the shortest schedule"
