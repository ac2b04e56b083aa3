"""A race on disk: one file per run, written atomically, then the table as JSON and CSV."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isokron.files import write_atomically
from isokron.race.results import Result, Run
from isokron.report.render import finite

SETTINGS = "settings.json"
RUNS = "runs"
NEW_FOLDER = "give a new folder with --out"


def slug(text: str, limit: int = 60) -> str:
    """A file name for any text; changed texts carry a hash, so that no two collide."""
    safe = re.sub(r"[^A-Za-z0-9._=-]+", "_", text)[:limit].strip(".")
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def open_folder(folder: Path, marker: str) -> None:
    """Make the folder, unless it cannot be written or has files but not the file `marker`."""
    name = f"out {str(folder)!r}"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{name} is a file; {NEW_FOLDER}")
    content = [path.name for path in folder.glob("*") if not path.name.startswith(".")]
    if content and marker not in content:
        raise ValueError(f"{name} has other files in it (such as {content[0]}); {NEW_FOLDER}")
    # before any work: a race that cannot be written would be lost
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error.strerror}; {NEW_FOLDER}") from None


@contextmanager
def race_folder(folder: Path, settings: Mapping[str, Any], resume: bool) -> Iterator[None]:
    """Hold a folder free for a new race, or one whose race has these settings and is resumed."""
    open_folder(folder, SETTINGS)
    with (folder / ".lock").open("w") as file:
        _lock(file, folder)
        saved = _read(folder / SETTINGS, dict) if read_runs(folder) else None
        if saved is not None and not resume:
            problem = "already holds a race; continue it with --resume"
            raise ValueError(f"out {str(folder)!r} {problem}, or {NEW_FOLDER}")
        for name in _differing(saved or settings, settings)[:1]:
            values = f"{name} was {(saved or {}).get(name)!r} and is now {settings.get(name)!r}"
            raise ValueError(f"cannot resume: {values}; use the same settings, or {NEW_FOLDER}")
        (folder / RUNS).mkdir(exist_ok=True)
        # also where an earlier attempt finished no run
        if saved is None:
            text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
            write_atomically(folder / SETTINGS, [text.encode()])
        yield


def _lock(file: io.TextIOBase, folder: Path) -> None:
    """Keep a second process from racing in the same folder, until this one ends."""
    # other systems than POSIX have no such lock
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        problem = "another process is racing in it; wait until it ends"
        raise ValueError(f"out {str(folder)!r}: {problem}, or {NEW_FOLDER}") from None


def holds(folder: Path, settings: Mapping[str, Any], but: Sequence[str]) -> bool:
    """Whether the folder has a race of these settings, except for those named in `but`."""
    saved = folder / SETTINGS
    return saved.is_file() and set(_differing(_read(saved, dict), settings)) <= set(but)


def _differing(saved: Any, settings: Mapping[str, Any]) -> list[str]:
    current = json.loads(json.dumps(settings))
    return [name for name in {**current, **saved} if saved.get(name) != current.get(name)]


def write_run(folder: Path, run: Run) -> None:
    length = "" if run.schedule is None else f"-steps{run.schedule}"
    name = f"{slug(run.optimizer)}-lr{run.lr!r}-seed{run.seed}{length}.json"
    text = json.dumps(asdict(run), indent=1, allow_nan=False) + "\n"
    write_atomically(folder / RUNS / name, [text.encode()])


def read_runs(folder: Path) -> list[Run]:
    def as_run(saved: dict[str, Any]) -> Run:
        values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
        return Run(**values)

    return [_read(path, as_run) for path in sorted((folder / RUNS).glob("[!.]*.json"))]


def _read(path: Path, make: Callable[[Any], Any]) -> Any:
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError):
        remedy = "delete it to have that run repeated"
        raise ValueError(f"{str(path)!r} is not a file this version wrote; {remedy}") from None


def as_json(result: Result) -> str:
    """Settings, standings, runs; the training loss of every step stays in the runs' files."""

    def record(run: Run) -> dict[str, Any]:
        return {k: v for k, v in asdict(run).items() if k != "train_losses"} | {"final": run.final}

    value = {
        "complete": result.complete,
        "settings": dict(result.settings),
        "standings": [asdict(standing) for standing in result.standings],
        "runs": [record(run) for run in result.runs],
        "probes": [record(run) for run in result.probes],
    }
    return json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(result: Result) -> str:
    """One row per run, diverged and failed ones too, and those on shorter schedules."""
    best = {standing.optimizer: standing.best_lr for standing in result.standings}
    rows = []
    for run in (*result.runs, *result.probes):
        count = len(run.train_losses)
        row = {
            "task": result.settings["task"],
            "optimizer": run.optimizer,
            "lr": run.lr,
            "seed": run.seed,
            "schedule_steps": run.schedule or result.settings["steps"],
            "status": run.status,
            "final_loss": run.final if run.status == "finished" else run.status,
            "best_loss": min(run.eval_losses, default=""),
            "steps_done": count,
            "seconds": f"{count * run.step_seconds:.3f}",
            "model_ms": f"{1e3 * run.model_seconds:.3f}",
            "optimizer_ms": f"{1e3 * run.optimizer_seconds:.3f}",
            "optimizer_bytes": run.optimizer_bytes,
            "best_lr": "yes" if run.lr == best[run.optimizer] else "no",
            "message": run.message,
        }
        rows.append(row)
    # an optimizer's runs of the race come first; on shorter schedules, the longest does
    rows.sort(key=lambda row: (row["optimizer"], -row["schedule_steps"], row["lr"], row["seed"]))
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
