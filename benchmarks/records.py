"""Results of a study on disk: one record per run, written as soon as it is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import conditions

from isokron.files import write_atomically

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"


class Records:
    """The file docs/benchmarks/NAME.json: facts about the study, and its runs, one per line."""

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
