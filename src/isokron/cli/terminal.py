"""What commands print: progress on stderr; tables, scores and evaluations on stdout."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from isokron.cli import process
from isokron.cli.encoding import echo, printable
from isokron.report.render import visible

if TYPE_CHECKING:
    from isokron.attribution import Attributor, Query, Scores
    from isokron.tasks import Shown

LOG_WIDTH = 250  # columns of a table that is not printed to a terminal
QUIET_SECONDS = 10.0  # between lines of progress outside a terminal
SHOWN = 3  # proponents and opponents per query
WIDTH = 60  # characters of a text


class Display:
    """Shows progress on stderr, on the first rank only; see isokron.training.Progress.

    A terminal has one progress bar, which is removed at the end. A log has a line every ten
    seconds, at the end of every stage, and for every message.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.console.quiet = not process.leads()
        # a dumb terminal cannot move its cursor, and gets lines like a log
        self.has_bar = self.console.is_terminal and not self.console.is_dumb_terminal
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed} of {task.total}"),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.has_bar,
        )
        self.task = self.bar.add_task("", visible=False, note="")
        self.stage = ""
        self.printed = time.monotonic()
        self.begun = {"load": self.printed}  # by stage

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        if total:
            self.begun.setdefault(stage, time.monotonic())
        if total and self.has_bar:
            if stage != self.stage:
                self.stage = stage
                self.bar.reset(self.task, total=total, description=stage, visible=True)
            self.bar.update(self.task, completed=done, total=total, note=visible(note))
        elif done == total or time.monotonic() - self.printed > QUIET_SECONDS:
            self.printed = time.monotonic()
            parts = [f"{done} of {total}" if total else "", note]
            text = ", ".join(part for part in parts if part)
            line = visible(f"{stage}: {text}" if text else stage)
            # a log has one line per message, however long
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def times(self) -> str:
        """Seconds of every stage, and the peak memory of the process."""
        starts = [*self.begun.values(), time.monotonic()]
        seconds = [last - first for first, last in itertools.pairwise(starts)]
        parts = [f"{name} {s:.1f} s" for name, s in zip(self.begun, seconds, strict=True)]
        return f"Time: {', '.join(parts)}{peak_memory()}"


def peak_memory() -> str:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return ""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # bytes on macOS, KiB elsewhere
    return f"; peak memory {size / (2**30 if sys.platform == 'darwin' else 2**20):.2f} GiB"


def output(least: int = 0, log: int = LOG_WIDTH) -> Console:
    """The console of stdout with at least `least` columns; `log` columns if not a terminal."""
    console = Console()
    width = max(console.width, least) if console.is_terminal else log
    return Console(width=width, markup=False, highlight=False)


def fitted_table(
    title: str, cells: list[list[str]], width: int, bold: int = -1, spare: Sequence[str] = ()
) -> Table:
    """A table for the terminal. cells: header, then rows; bold: index of a row.

    If it is wider than `width`, columns are dropped in the order of `spare`; without `spare`, the
    table is transposed.
    """

    def fits() -> bool:
        return 1 + sum(longest(column) + 3 for column in columns) < width

    def longest(column: Sequence[Text]) -> int:
        # headers may break between words
        return max(map(len, [*str(column[0]).split(), *map(str, column[1:])]))

    rows = [
        [Text(printable(cell), "bold" if i == bold else "") for cell in row]
        for i, row in enumerate(cells)
    ]
    columns = list(zip(*rows, strict=True))
    for name in spare:
        if not fits():
            columns = [column for column in columns if str(column[0]) != printable(name)]
    if not fits() and not spare:
        columns = [tuple(row) for row in rows]
    table = Table(title=Text(printable(title)), title_justify="left")
    for i, column in enumerate(columns):
        options: dict[str, Any] = {"overflow": "fold", "vertical": "bottom"}
        options["min_width"] = longest(column) if fits() else None
        table.add_column(column[0], justify="right" if i else "left", **options)
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*row)
    return table


def show_scores(a: Attributor, queries: Sequence[Query], scores: Scores, most: int = SHOWN) -> None:
    """Print the top examples of every query with their shares of the positive influence."""
    if scores.noise is not None:
        hint = "" if scores.noise.spearman >= 0.9 else "; use a larger --dim, or --no-store"
        echo(
            f"\nProjected scores: rank correlation {scores.noise.spearman:.2f} with exact ones on "
            f"{scores.noise.sample} examples{hint}"
        )
        if scores.coverage["covered"] < a.selection.covered:
            echo(f"Store: {scores.coverage['summary'].rpartition('; covers ')[2]}")
    one_by_one = len(scores) == len(queries)
    for number, top in enumerate(scores.top(most)):
        query = queries[number] if one_by_one else queries[0]
        name = query.name if one_by_one else f"{len(queries)} queries"
        text = "".join(query.shown[0].tokens) if query.shown[0].generated else ""
        echo(f"\n{joined(name)[:WIDTH]}{' → ' if text else ': '}{text or one_line(query.shown[0])}")
        positive = float(scores[number].clamp_min(0).sum())
        for sign, ranked in (("+", top.proponents), ("−", top.opponents)):
            for entry in ranked:
                # without proponents there is no positive influence, and scores are shown instead
                size = abs(entry.score) / (positive or 1.0)
                size_text = f"{size:7.2%}" if positive else f"{size:7.3g}"
                line = f"{joined(entry.id):<20}  {example_line(a, entry.example)}"
                echo(f"  {sign} {size_text}  {line}")
        checked = scores.answers[number]["verify"] if scores.answers else None
        if checked is not None:
            groups = ("proponents", "random", "opponents")
            moves = [f"{g} {checked[g]:+.3g}" for g in groups if checked[g] is not None]
            before = f"{checked['before']:.3g}"
            echo(f"  loss {before} nats, change after one step on: {', '.join(moves)}")
            foremost = scores.answers[number]["proponents"][0]
            if foremost["nats"] is not None:
                change = f"{foremost['nats']:+.3g} nats"
                echo(f"  predicted change without {joined(foremost['id'])}: {change}")


def score_records(
    a: Attributor, queries: Sequence[Query], scores: Scores, count: int
) -> Iterator[dict[str, Any]]:
    """One JSON object per query: its top examples with their texts."""
    for query, top in zip(queries, scores.top(count), strict=True):
        record: dict[str, Any] = {"query": query.name}
        for side in ("proponents", "opponents"):
            record[side] = [
                {**entry._asdict(), "text": example_line(a, entry.example, width=10**6)}
                for entry in getattr(top, side)
            ]
        yield record


def example_line(a: Attributor, number: int, width: int = WIDTH) -> str:
    """A training example in one line."""
    return one_line(a.show(a.data.batch([number]))[0], width)


def one_line(shown: Shown, width: int = WIDTH) -> str:
    text = joined(shown.text)
    text = text if len(text) <= width else text[: width - 1] + "…"
    parts = [joined(shown.title), f"label {joined(shown.label)}" if shown.label else "", text]
    return ", ".join(part for part in parts if part)


def joined(text: str) -> str:
    """The text in one line: an id with a line break must not look like another entry."""
    return " ".join(text.split())
