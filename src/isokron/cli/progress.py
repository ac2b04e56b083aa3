"""What commands print: progress on stderr, tables with their notes on stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from isokron.cli import processes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table
    from rich.text import Text

LOG_WIDTH = 250  # of texts where there is no terminal: a table with every column
QUIET_SECONDS = 10.0  # between lines where there is no terminal


def show_table(
    table: Callable[[int], Table],
    notes: Iterable[str],
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    least: int = 0,
) -> None:
    """Print a table made for a width, and texts.

    least: a narrower terminal wraps lines, which is better than numbers that are cut.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        # a log does not wrap
        console = Console(width=least or LOG_WIDTH, color_system=None)
    elif console.width < least:
        console = Console(width=least)

    def say(texts: Iterable[str], style: str = "") -> None:
        for text in texts:
            console.print(text, style=style, markup=False, highlight=False)

    say(before)
    console.print(table(console.width))
    say(notes, "dim")
    say(after)


def fitted_table(
    title: str, cells: list[list[str]], width: int, bold: int = -1, spare: Iterable[str] = ()
) -> Table:
    """A table for the terminal. cells: the head, then the rows; bold: the row that is.

    Where it does not fit, columns named in `spare` are left out in that order; where there are
    none, rows become columns.
    """
    from rich.table import Table
    from rich.text import Text

    def least(column: Sequence[Text]) -> int:
        # heads may break between words
        return max(map(len, [*str(column[0]).split(), *map(str, column[1:])]))

    def fits() -> bool:
        return 1 + sum(least(column) + 3 for column in columns) < width

    rows = [
        [Text(cell, "bold" if i == bold else "") for cell in row] for i, row in enumerate(cells)
    ]
    columns = list(zip(*rows, strict=True))
    for name in spare:
        if not fits():
            columns = [column for column in columns if str(column[0]) != name]
    if not fits() and not spare:
        columns = [tuple(row) for row in rows]
    table = Table(title=Text(title), title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(
            column[0],
            justify="left" if i == 0 else "right",
            overflow="fold",
            vertical="bottom",
            min_width=least(column) if fits() else None,
        )
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*row)
    return table


class Display:
    """Shows on stderr what it is called with; see isokron.training.Progress.

    In a terminal one bar is redrawn in place and removed at the end. Elsewhere there is a line
    every ten seconds, at the end of every stage, and for every message. One of several ranks shows.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console or Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed} of {task.total}"),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not (self.console.is_terminal and processes.leads()),
        )
        self.stage: str | None = None
        self.task: TaskID | None = None
        self.printed = time.monotonic()

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        if self.console.is_terminal and not self.bar.disable:
            self._draw(stage, done, total, note)
        elif processes.leads():
            self._print(stage, done, total, note)

    def _draw(self, stage: str, done: int, total: int, note: str) -> None:
        # a message stays above the bar
        if not total:
            self.console.print(f"{stage}: {note}" if note else stage, markup=False, highlight=False)
            return
        if self.task is None or stage != self.stage:
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.stage, self.task = stage, self.bar.add_task(stage, note="")
        self.bar.update(self.task, completed=done, total=total, note=note)

    def _print(self, stage: str, done: int, total: int, note: str) -> None:
        if done < total and time.monotonic() - self.printed < QUIET_SECONDS:
            return
        self.printed = time.monotonic()
        count = [f"{done} of {total}"] if total else []
        text = ", ".join([*count, *([note] if note else [])])
        print(f"{stage}: {text}" if text else stage, file=self.console.file, flush=True)
