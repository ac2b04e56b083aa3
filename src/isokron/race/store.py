"""A race on disk: every run in its own file, whole or absent, whenever the process dies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isokron.files import write_atomically
from isokron.race.results import Run

SETTINGS = "settings.json"
RUNS = "runs"


def slug(text: str, limit: int = 60) -> str:
    """A file name for any text; changed texts carry a hash, so that no two collide."""
    safe = re.sub(r"[^A-Za-z0-9._=-]+", "_", text)[:limit].strip(".")
    if safe == text:
        return safe
    return f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def is_race(folder: Path) -> bool:
    """Whether the folder was written by a race."""
    return (folder / SETTINGS).is_file()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process from racing in the same folder; let go when this one ends, however."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"out {str(folder)!r}: another process is racing in it; wait for its end, "
                "or give a new folder with --out"
            ) from None
        yield


@dataclass(frozen=True)
class Store:
    """The folder of one race."""

    folder: Path

    def run_path(self, run: Run) -> Path:
        length = "" if run.schedule is None else f"-steps{run.schedule}"
        name = f"{slug(run.optimizer)}-lr{run.lr!r}-seed{run.seed}{length}.json"
        return self.folder / RUNS / name

    def write_run(self, run: Run) -> None:
        text = json.dumps(asdict(run), indent=1, allow_nan=False) + "\n"
        write_atomically(self.run_path(run), [text.encode()])

    def read_runs(self) -> list[Run]:
        return [_read_run(path) for path in sorted((self.folder / RUNS).glob("[!.]*.json"))]

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Say what is raced, unless runs of these settings are there already."""
        if not self.read_runs():  # also where an earlier attempt came to nothing
            self.write(SETTINGS, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
        (self.folder / RUNS).mkdir(exist_ok=True)

    def write(self, name: str, text: str) -> None:
        write_atomically(self.folder / name, [text.encode()])


def open_store(folder: Path, settings: Mapping[str, Any], resume: bool) -> Store:
    """A folder free for a new race, or one with a race to take up whose settings are the same."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out {str(folder)!r} is a file; give a new folder with --out")
    content = [path for path in folder.glob("*") if not path.name.startswith(".")]
    if is_race(folder) and Store(folder).read_runs():
        if not resume:
            raise ValueError(
                f"out {str(folder)!r} already holds a race; continue it with --resume, "
                "or give a new folder with --out"
            )
        _check_same(_read_json(folder / SETTINGS), settings)
    elif content and not is_race(folder):
        raise ValueError(
            f"out {str(folder)!r} has other files in it (such as {content[0].name}); "
            "give a new folder with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return Store(folder)


def holds(folder: Path, settings: Mapping[str, Any], but: Sequence[str]) -> bool:
    """Whether the folder has a race of these settings, the ones named in `but` aside."""
    return is_race(folder) and set(_differing(_read_json(folder / SETTINGS), settings)) <= set(but)


def _differing(saved: Any, settings: Mapping[str, Any]) -> list[str]:
    now = json.loads(json.dumps(settings))
    return [name for name in {**now, **saved} if saved.get(name) != now.get(name)]


def _check_same(saved: Any, settings: Mapping[str, Any]) -> None:
    for name in _differing(saved, settings)[:1]:
        raise ValueError(
            f"cannot resume: {name} was {saved.get(name)!r} and is now {settings.get(name)!r}; "
            "use the same settings, or give a new folder with --out"
        )


def _read_run(path: Path) -> Run:
    saved = _read_json(path)
    try:
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()
        }
        return Run(**fields)
    except (TypeError, AttributeError):
        raise ValueError(_unreadable(path)) from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(_unreadable(path)) from None


def _unreadable(path: Path) -> str:
    return f"{str(path)!r} is not a file this version wrote; delete it to have that run repeated"
