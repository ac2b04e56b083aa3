"""What a person sees while an inspection runs: a bar in a terminal, elsewhere plain lines."""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

QUIET_SECONDS = 10.0  # between lines where there is no terminal


class Watcher(Protocol):
    """Is told of every stage: its name, how many units it has, and how many are done."""

    def began(self, stage: str, total: int, unit: str) -> None: ...

    def advanced(self, done: int, note: str = "") -> None: ...


class Silent:
    """Says nothing."""

    def began(self, stage: str, total: int, unit: str) -> None: ...

    def advanced(self, done: int, note: str = "") -> None: ...


class Lines:
    """Plain lines, without control characters, for logs and pipes: the end of every stage too."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.spoke = time.monotonic()
        self.stage, self.total, self.unit = "", 0, ""

    def began(self, stage: str, total: int, unit: str) -> None:
        self.stage, self.total, self.unit = stage, total, unit

    def advanced(self, done: int, note: str = "") -> None:
        if done < self.total and time.monotonic() - self.spoke < QUIET_SECONDS:
            return
        self.spoke = time.monotonic()
        more = f", {note}" if note else ""
        text = f"{self.stage}: {self.unit} {done} of {self.total}{more}"
        print(text, file=self.stream, flush=True)


class Bar:
    """One bar, redrawn in place and gone when all is done."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[unit]} {task.completed} of {task.total}"),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.now: TaskID | None = None

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def began(self, stage: str, total: int, unit: str) -> None:
        if self.now is not None:
            self.progress.remove_task(self.now)
        self.now = self.progress.add_task(stage, total=total, unit=unit, note="")

    def advanced(self, done: int, note: str = "") -> None:
        if self.now is not None:
            self.progress.update(self.now, completed=done, note=note)
