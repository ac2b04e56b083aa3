"""Run a race: validate its arguments, train the runs missing in its folder, write the reports."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch

from isokron._version import __version__
from isokron.files import check_free, check_same, lock, read_json, write_json
from isokron.optimizers_by_name import YARDSTICK, resolve
from isokron.race import train
from isokron.race.page import write_reports
from isokron.race.results import Result, Run, Standing, summarize
from isokron.tasks import Task, load
from isokron.training import Progress, digest, make_model, silent

EVERY = "*"  # in a mapping of learning rates: all optimizers not named
EXTENSIONS = 2  # of a sweep whose best learning rate lies at an edge
FACTOR = 3.0  # between learning rates of an extended sweep
SETTINGS, RUNS = "settings.json", "runs"
NEW_FOLDER = "give a new folder"

# a run: optimizer, learning rate, seed, and steps of a shorter schedule than the race's
Key: TypeAlias = tuple[str, float, int, int | None]
Rates: TypeAlias = Sequence[float] | Mapping[str, Sequence[float]] | None


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
    """Compare optimizers on a task; `adamw` always takes part.

    Args:
        task: a Task, or its name as for `isokron race --task`.
        optimizers: built-in names, or `module:name`, with options in parentheses.
        steps: training steps per run.
        seeds: runs per learning rate.
        lrs: learning rates for all, or optimizer → learning rates ("*" for the others). By default
            each optimizer has its own sweep, extended while its best value lies at an edge.
        shortest: also find the shortest schedule with which each optimizer reaches AdamW's loss.
        out: folder for the files and the page; None writes none.
        resume: continue the race in `out`.
        progress: called with (stage, steps done, steps in total, note).
    """
    race = Race(task, optimizers, steps, seeds, lrs, shortest)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(out or temporary)
        with race_folder(folder, race.settings, resume):
            result = race.run(folder, progress)
    if not result.complete:
        raise KeyboardInterrupt
    return result


class Race:
    """A race with the validated arguments of `run`.

    settings: everything that its results depend on.
    """

    def __init__(
        self,
        task: Task | str,
        optimizers: Iterable[str],
        steps: int,
        seeds: int,
        lrs: Rates = None,
        shortest: bool = False,
    ) -> None:
        for name, value in (("steps", steps), ("seeds", seeds)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        specs = list(dict.fromkeys([YARDSTICK, *optimizers]))
        self.entrants = {spec: resolve(spec) for spec in specs}
        rates = _rates(lrs, specs)
        self.task = task = task if isinstance(task, Task) else load(task)
        # not among the settings: a race may be resumed with or without this search
        self.shortest = shortest
        model = make_model(task, 0)
        tensors = [*task.train.tensors, *task.held_out.tensors, *model.state_dict().values()]
        self.settings: dict[str, Any] = {
            "task": task.name,
            "unit": task.unit,
            "steps": steps,
            "seeds": seeds,
            "optimizers": specs,
            "learning rates": {s: rates.get(s, list(self.entrants[s].lrs)) for s in specs},
            "sweep may grow": sorted(set(specs) - rates.keys()),
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

    def run(self, folder: Path, progress: Progress = silent) -> Result:
        """Train the runs missing in a folder locked by `race_folder`, and write the reports.

        After Ctrl-C the result is incomplete.
        """
        # failed runs are repeated, since the optimizer may have been fixed
        saved = [run for run in read_runs(folder) if run.status != "failed"]
        done: dict[Key, Run] = {(r.optimizer, r.lr, r.seed, r.schedule): r for r in saved}
        total, complete = 0, False
        try:
            for keys, why in self._rounds(done):
                missing = [key for key in keys if key not in done]
                if missing and why:
                    progress(f"{len(missing)} more runs: {why}", 0, 0)
                first, total = total + 1, total + len(missing)
                for number, key in enumerate(missing, start=first):
                    # added before it is written, so that Ctrl-C cannot separate the two
                    done[key] = self._train(key, f"run {number} of {total}", progress)
                    write_run(folder, done[key])
            complete = True
        except KeyboardInterrupt:
            pass
        result = summarize(self.settings, done.values(), complete, self.shortest)
        write_reports(result, folder)
        return result

    def _train(self, key: Key, number: str, progress: Progress) -> Run:
        optimizer, lr, seed, schedule = key
        steps = schedule or self.settings["steps"]
        length = "" if schedule is None else f", {steps} steps"
        stage = f"{number}, {optimizer}, lr {lr:g}, seed {seed}{length}"

        def on_step(step: int, loss: float) -> None:
            progress(stage, step, steps, f"training loss {loss:.4g}")

        run = train.train(self.task, self.entrants[optimizer], lr, seed, steps, on_step)
        run.schedule = schedule
        count = len(run.train_losses)
        final = f"final loss {run.final:.4f}" if run.status == "finished" else run.status
        progress(stage, count, count, final)
        return run

    def _rounds(self, done: Mapping[Key, Run]) -> Iterator[tuple[Iterable[Key], str]]:
        """Runs to train, with a reason: sweeps, their extensions, then shorter schedules."""
        seeds = self.settings["seeds"]
        sweeps = {spec: list(lrs) for spec, lrs in self.settings["learning rates"].items()}
        yield interleaved(sweeps, seeds), ""
        for _ in range(EXTENSIONS):
            # without runs of later extensions, which a resumed race may have on disk
            runs = [run for run in done.values() if run.lr in sweeps[run.optimizer]]
            extended = {
                s.optimizer: [lr]
                for s in summarize(self.settings, runs).standings
                if s.optimizer in self.settings["sweep may grow"] and (lr := next_lr(s))
            }
            for spec, lrs in extended.items():
                sweeps[spec] += lrs
            yield interleaved(extended, seeds), "the best learning rate is at an edge of the sweep"
        while self.shortest:
            standings = summarize(self.settings, done.values(), searched=True).standings
            keys = [
                (s.optimizer, s.best_lr or 0.0, seed, s.untried[(len(s.untried) - 1) // 2])
                for seed in range(seeds)
                for s in standings
                if s.untried
            ]
            if not keys:
                return
            yield keys, "looking for the shortest schedule"


def _rates(lrs: Rates, specs: Collection[str]) -> dict[str, list[float]]:
    """Optimizer → its learning rates, for optimizers that were given any."""
    named = {} if lrs is None else dict(lrs) if isinstance(lrs, Mapping) else {EVERY: lrs}
    for spec, rates in named.items():
        if spec not in (EVERY, *specs):
            present = f"in the race are {', '.join(specs)}"
            raise ValueError(f"lr is given for {spec!r}, which is not in the race; {present}")
        wrong = [lr for lr in rates if not (lr > 0 and math.isfinite(lr))]
        if wrong or not rates:
            value = wrong[0] if wrong else "none"
            raise ValueError(f"lr must be positive numbers, got {value}; write 1e-3,3e-3")
    chosen = {spec: named.get(spec, named.get(EVERY, ())) for spec in specs}
    return {spec: sorted(set(rates)) for spec, rates in chosen.items() if rates}


def machine() -> str:
    """Processor and number of cores, without the host's name."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def interleaved(sweeps: Mapping[str, Sequence[float]], seeds: int) -> Iterator[Key]:
    """Runs by seed, then by position in the sweep, then by optimizer."""
    # optimizers take turns, so that a slow phase of the machine affects all of them
    for seed in range(seeds):
        for lrs in zip_longest(*sweeps.values()):
            yield from ((s, lr, seed, None) for s, lr in zip(sweeps, lrs, strict=True) if lr)


def next_lr(standing: Standing) -> float | None:
    """The learning rate beyond the edge of the sweep at which the best lies, or None."""
    lrs, best = standing.lrs, standing.best_lr
    # if all diverged, a smaller one
    if best is None or best == lrs[0]:
        return None if standing.failure else float(f"{lrs[0] / FACTOR:.3g}")
    return float(f"{lrs[-1] * FACTOR:.3g}") if best == lrs[-1] else None


def slug(text: str, limit: int = 60) -> str:
    """A file name for any text; if characters are replaced, a hash keeps it unique."""
    safe = re.sub(r"[^A-Za-z0-9._=-]+", "_", text)[:limit].strip(".")
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def open_folder(folder: Path, marker: str) -> None:
    """Create a folder for results; refuse one that is not writable or has other files in it.

    marker: a file by which an earlier result is recognized.
    """
    check_free(folder, marker)
    # tried before any work, which would be lost otherwise
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ValueError(f"out {str(folder)!r} {problem}; {NEW_FOLDER}") from None


@contextmanager
def race_folder(folder: Path, settings: Mapping[str, Any], resume: bool) -> Iterator[None]:
    """Lock a folder for a new race, or to resume a race with the same settings."""
    open_folder(folder, SETTINGS)
    with (folder / ".lock").open("wb") as file:
        if not lock(file, wait=False):
            problem = "another process is running a race in it; wait until it ends"
            raise ValueError(f"out {str(folder)!r}: {problem}, or {NEW_FOLDER}")
        # a folder without a finished run can be reused
        if any(folder.glob(f"{RUNS}/[!.]*.json")):
            if not resume:
                problem = "already holds a race; continue it with resume=True"
                raise ValueError(f"out {str(folder)!r} {problem}, or {NEW_FOLDER}")
            saved = read_json(folder / SETTINGS, NEW_FOLDER)
            check_same(folder, "race", saved, settings)
        # first: by them the folder is known as a race's, also if this process is killed here
        write_json(folder / SETTINGS, settings)
        (folder / RUNS).mkdir(exist_ok=True)
        yield


def write_run(folder: Path, run: Run) -> None:
    length = "" if run.schedule is None else f"-steps{run.schedule}"
    name = f"{slug(run.optimizer)}-lr{run.lr!r}-seed{run.seed}{length}.json"
    write_json(folder / RUNS / name, asdict(run))


def read_runs(folder: Path) -> list[Run]:
    return [_read_run(path) for path in sorted((folder / RUNS).glob("[!.]*.json"))]


def _read_run(path: Path) -> Run:
    remedy = "delete it, and the same command makes the run again"
    try:
        return Run(**read_json(path, remedy))
    except TypeError as error:
        raise ValueError(f"{path} is no run of a race: {error}; {remedy}") from None
