"""Results on disk: the runs of a study, one by one, or the output that a script prints."""

from __future__ import annotations

import datetime
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from timing import conditions

from isokron.files import write_atomically

# `make bench QUICK=1` writes elsewhere, so that it never replaces what pages cite
FOLDER = Path(
    os.environ.get("ISOKRON_BENCHMARKS", Path(__file__).parent.parent / "docs" / "benchmarks")
)


class Records:
    """The file docs/benchmarks/NAME.json: facts about the study, and its runs, one per line."""

    frozen = False  # True: `once` never computes, and raises KeyError for a run that is missing

    def __init__(self, name: str) -> None:
        self.path = FOLDER / f"{name}.json"
        self.facts: dict[str, Any] = {}
        self.runs: list[dict[str, Any]] = []
        if self.path.exists():
            self.facts = json.loads(self.path.read_text())
            self.runs = self.facts.pop("runs")

    def select(self, **key: Any) -> list[dict[str, Any]]:
        """The runs with these values."""
        return [run for run in self.runs if key.items() <= run.items()]

    def once(self, compute: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any]:
        """The run with this key: from the file or, the first time, computed and written."""
        saved = self.select(**key)
        if saved:
            return saved[0]
        if self.frozen:
            raise KeyError(f"{self.path.name} has no run with {key}")
        run = {**key, **compute()}
        self.runs.append(run)
        self.save()
        shown = {k: v for k, v in run.items() if not isinstance(v, list)}
        print(" ".join(f"{k}={v}" for k, v in shown.items()), flush=True)
        return run

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({**self.facts, "conditions": conditions()}, indent=1)[:-2]
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        write_atomically(self.path, [f'{head},\n "runs": [\n{lines}\n ]\n}}\n'.encode()])


class _Copied(io.StringIO):
    """Text that is also printed."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        return super().write(text)

    def flush(self) -> None:
        sys.__stdout__.flush()  # type: ignore[union-attr]


@contextmanager
def recorded(name: str) -> Iterator[None]:
    """Print as always, and write the lines as a run of NAME.json, one run per command line.

    Nothing is written if the script fails.
    """
    output = _Copied()
    with redirect_stdout(output):
        yield
    # an absolute path is of this machine alone
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    records, arguments = Records(name), " ".join(words)
    records.runs = [run for run in records.runs if run["arguments"] != arguments]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [line for line in output.getvalue().splitlines() if line.strip()]
    records.runs.append({"arguments": arguments, "date": today, "printed": lines})
    records.save()
