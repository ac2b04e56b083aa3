"""Run a race: validate its arguments, train the runs missing in its folder, write the reports."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

import isokron
from isokron._version import __version__
from isokron.files import check_free, check_same, lock, read_json, write_json
from isokron.optim.settings import is_number
from isokron.optimizers_by_name import YARDSTICK, Entrant, parse_spec, resolve
from isokron.race import train
from isokron.race.page import write_reports
from isokron.race.results import TUNED, Result, Run, summarize
from isokron.race.search import Key, Plans, Setting, search_for
from isokron.tasks import Task, load
from isokron.training import Progress, digest, make_model, silent

EVERY = "*"  # in a mapping of learning rates: all optimizers not named
SETTINGS, RUNS = "settings.json", "runs"
NEW_FOLDER = "give a new folder"

# (0.005, 10): 0.005 for hidden matrices, 10 times that for everything else
Rate: TypeAlias = float | tuple[float, float]
Rates: TypeAlias = float | Sequence[Rate] | Mapping[str, float | Sequence[Rate]] | None


def run(
    task: Task | str,
    optimizers: Iterable[str] = ("adamw", "muon"),
    *,
    steps: int = 300,
    seeds: int = 2,
    lr: Rates = None,
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
        seeds: runs of the best setting of each optimizer or, where `lr` is given, of each rate.
        lr: a learning rate or several for all, or optimizer → learning rates ("*" for the others);
            [(0.005, 10)] is 0.005 for hidden matrices and 10 times that for everything else. By
            default all are tuned in the same way; see docs/race.md.
        shortest: also find the shortest schedule with which each optimizer reaches AdamW's loss.
        out: folder for the files and the page; None writes none.
        resume: continue the race in `out`.
        progress: called with (stage, steps done, steps in total, note).
    """
    race = Race(task, optimizers, steps, seeds, lr, shortest)
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
        lr: Rates = None,
        shortest: bool = False,
    ) -> None:
        for name, value in (("steps", steps), ("seeds", seeds)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        specs = list(dict.fromkeys([YARDSTICK, *optimizers]))
        self.entrants = {spec: resolve(spec) for spec in specs}
        # settings that the user gave; all other optimizers are tuned
        self.grids = _grids(lr, self.entrants)
        self.task = task = task if isinstance(task, Task) else load(task)
        # not among the settings: a race may be resumed with or without this search
        self.shortest = shortest
        model = make_model(task, 0)
        check_options(model, self.entrants)
        if not has_two_kinds(model):
            self.entrants = {spec: replace(e, two_rates=False) for spec, e in self.entrants.items()}
        tensors = [*task.train.tensors, *task.held_out.tensors, *model.state_dict().values()]
        self.settings: dict[str, Any] = {
            "task": task.name,
            "unit": task.unit,
            "steps": steps,
            "seeds": seeds,
            "optimizers": specs,
            "learning rates": {spec: texts(grid) or TUNED for spec, grid in self.grids.items()},
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
        done: dict[Key, Run] = {(run.setting, run.steps, run.seed): run for run in saved}
        total, complete = 0, False
        try:
            for keys, why in self._rounds(done):
                missing = [key for key in keys if key not in done]
                if missing and why:
                    more = f"{len(missing)} more run{'s' if len(missing) > 1 else ''}"
                    progress(f"{more}: {why}", 0, 0)
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
        setting, steps, seed = key
        is_probe = steps != self.settings["steps"]
        length = f", {steps} steps" if is_probe else ""
        stage = f"{number}, {setting.name}, lr {setting}, seed {seed}{length}"

        def on_step(step: int, loss: float) -> None:
            progress(stage, step, steps, f"training loss {loss:.4g}")

        # of shorter runs only the final loss counts, and an evaluation may take ten steps' time
        evaluations = train.FEW_EVALUATIONS if is_probe else train.EVALUATIONS
        run = train.train(
            self.task,
            self.entrants[setting.name],
            setting,
            seed,
            steps,
            on_step,
            evaluations=evaluations,
        )
        count = len(run.train_losses)
        final = f"final loss {run.final:.4f}" if run.status == "finished" else run.status
        progress(stage, count, count, final)
        return run

    def _rounds(self, done: Mapping[Key, Run]) -> Iterator[tuple[list[Key], str]]:
        """Runs to train, with a reason: tuning and further seeds, then shorter schedules."""
        steps, seeds = self.settings["steps"], self.settings["seeds"]

        def loss(*key: Any) -> float:
            return math.nan if done[key].status == "failed" else done[key].final

        plans: list[Plans] = []
        for spec, grid in self.grids.items():
            runs = [(setting, steps, seed) for seed in range(seeds) for setting in grid]
            search = search_for(self.entrants[spec], steps, seeds, loss)
            plans.append(iter([runs]) if grid else search.plans())
        why = ""
        while any(batch := [next(plan, []) for plan in plans]):
            # optimizers take turns, so that a slow phase of the machine affects all of them
            yield [key for turn in zip_longest(*batch) for key in turn if key], why
            why = "looking for the best settings"
        while self.shortest:
            standings = summarize(self.settings, done.values(), searched=True).standings
            keys = [
                (s.setting, s.untried[(len(s.untried) - 1) // 2], seed)
                for seed in range(seeds)
                for s in standings
                if s.setting and s.untried
            ]
            if not keys:
                return
            yield keys, "looking for the shortest schedule"


def _grids(lr: Rates, entrants: Mapping[str, Entrant]) -> dict[str, list[Setting]]:
    """Optimizer → the settings that the user gave, in ascending order; [] for none."""
    values = {} if lr is None else lr if isinstance(lr, Mapping) else {EVERY: lr}
    named = {spec: (v,) if isinstance(v, (int, float)) else v for spec, v in values.items()}
    for spec, rates in named.items():
        if spec not in (EVERY, *entrants):
            present = f"in the race are {', '.join(entrants)}"
            raise ValueError(f"lr is given for {spec!r}, which is not in the race; {present}")
        if isinstance(rates, str) or not isinstance(rates, Sequence):
            remedy = "write [0.001, 0.003]"
            raise ValueError(f"lr must be a list of learning rates, got {rates!r}; {remedy}")
        parts = [r if isinstance(r, tuple) and len(r) == 2 else (r,) for r in rates]
        wrong = [n for part in parts for n in part if not (is_number(n) and n > 0)]
        if wrong or not rates:
            value = repr(wrong[0]) if wrong else "none"
            raise ValueError(f"lr must be positive numbers, got {value}; write 1e-3,3e-3")
    grids = {}
    for spec, entrant in entrants.items():
        rates = named.get(spec, named.get(EVERY, ()))
        pairs = {rate if isinstance(rate, tuple) else (rate, 1) for rate in rates}
        grids[spec] = [Setting(spec, *pair) for pair in sorted(pairs)]
        if not entrant.two_rates and any(ratio != 1 for _, ratio in pairs):
            problem = "has one learning rate: it takes the model, or has lr_scale or match_adamw"
            raise ValueError(f"lr gives {spec!r} two learning rates, but it {problem}; give one")
    return grids


def texts(grid: Iterable[Setting]) -> list[float | str]:
    """Learning rates as they are written on the command line."""
    return [s.lr if s.ratio == 1 else f"{s.lr}x{s.ratio:g}" for s in grid]


def check_options(model: nn.Module, entrants: Mapping[str, Entrant]) -> None:
    """Refuse options of isokron's optimizers that do not fit the model, such as patterns."""
    for spec, entrant in entrants.items():
        if ":" not in parse_spec(spec)[0]:
            try:
                with torch.random.fork_rng(devices=[]):
                    entrant.build(model, entrant.lr)
            except ValueError as error:
                raise ValueError(f"optimizer {spec!r}: {error}") from None


def has_two_kinds(model: nn.Module) -> bool:
    """Whether there are hidden matrices and other parameters, so that two rates can differ."""
    with warnings.catch_warnings(action="ignore"):  # check_options has warned
        groups = isokron.param_groups(model, lr_scale={"matrices": 1.0, "*": 2.0})
    return len({group["lr_scale"] for group in groups}) > 1


def machine() -> str:
    """Processor and number of cores, without the host's name."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


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
    parts = {"lr": run.lr, "rest": run.ratio, "beta2": run.beta2, "decay": run.decay}
    usual = {"rest": 1, "beta2": None, "decay": None}
    parts = {name: value for name, value in parts.items() if value != usual.get(name)}
    parts |= {"steps": run.steps, "seed": run.seed}
    name = "-".join([slug(run.optimizer), *(f"{key}{value!r}" for key, value in parts.items())])
    write_json(folder / RUNS / f"{name}.json", asdict(run))


def read_runs(folder: Path) -> list[Run]:
    return [_read_run(path) for path in sorted((folder / RUNS).glob("[!.]*.json"))]


def _read_run(path: Path) -> Run:
    remedy = "delete it, and the same command makes the run again"
    try:
        return Run(**read_json(path, remedy))
    except TypeError as error:
        raise ValueError(f"{path} is no run of a race: {error}; {remedy}") from None
