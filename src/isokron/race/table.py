"""The standings as rows of text, the same in the terminal and on the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isokron.pages.numbers import memory
from isokron.race.optimizers import YARDSTICK
from isokron.race.results import Result, Standing
from isokron.race.shortest import finals

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "optimizer",
    "best lr",
    "final loss",
    "best loss",
    "steps to AdamW's loss",
    "time to AdamW's loss",
    "step, ms: model + optimizer",
    "optimizer memory",
    "diverged",
)
SHORTEST = ("shortest schedule", "time of that schedule")  # after the times to AdamW's loss
PLACE = COLUMNS.index("time to AdamW's loss") + 1
NONE = "–"
BUSY = 1.15  # between optimizers, forward and backward should take the same time


def columns(result: Result) -> list[str]:
    """The heads of the table: those of the shortest schedules only where they were looked for."""
    more = SHORTEST if result.searched else ()
    return [*COLUMNS[:PLACE], *more, *COLUMNS[PLACE:]]


def rows(result: Result) -> list[list[str]]:
    """One row per optimizer, cells as in `columns`."""
    yardstick = next((s for s in result.standings if s.optimizer == YARDSTICK), None)
    reachable = yardstick is not None and yardstick.best_lr is not None
    goal = yardstick.final if yardstick is not None and reachable else None
    found = []
    for standing in result.standings:
        row = _row(standing, result, reachable)
        row[PLACE:PLACE] = _shortest_cells(standing, result, goal) if result.searched else []
        found.append(row)
    return found


def _row(standing: Standing, result: Result, reachable: bool) -> list[str]:
    runs = result.runs_of(standing.optimizer)
    diverged = f"{standing.diverged} of {len(runs)} runs" if standing.diverged else "none"
    if standing.best_lr is None:
        tried = len(runs) and standing.diverged == len(runs)
        state = "failed" if standing.failure else "diverged" if tried else "not finished"
        return [standing.optimizer, NONE, state, *[NONE] * 5, diverged]
    spread = f" ± {standing.spread:.4f}" if standing.spread is not None else ""
    missed = "not reached" if reachable else NONE
    return [
        standing.optimizer,
        f"{standing.best_lr:g}" + (" (edge)" if standing.edge else ""),
        f"{standing.final:.4f}{spread}",
        f"{standing.best:.4f}",
        _ratio(standing.steps_to_reach, standing.fewer_steps, "{:.0f}", "fewer") or missed,
        _ratio(standing.seconds_to_reach, standing.less_time, "{:.2f} s", "less") or missed,
        f"{_ms(standing.model_seconds)} + {_ms(standing.optimizer_seconds)}",
        memory(standing.optimizer_bytes or 0),
        diverged,
    ]


def _shortest_cells(standing: Standing, result: Result, goal: float | None) -> list[str]:
    """Steps and seconds of the shortest schedule, and what share they are of AdamW's."""
    steps, found = result.settings["steps"], standing.shortest
    if standing.best_lr is None or goal is None:
        return [NONE, NONE]
    if standing.optimizer == YARDSTICK:
        return [f"{steps} steps", f"{steps * standing.step_seconds:.2f} s"]
    if found is not None:
        share = f" ({found.time_share:.2f}×)" if found.time_share is not None else ""
        return [f"{found.steps} steps ({found.share:.2f}×)", f"{found.seconds:.2f} s{share}"]
    if standing.final > goal:
        return ["not reached", "not reached"]
    failed = any(r.status == "failed" for r in result.probes if r.optimizer == standing.optimizer)
    return ["failed" if failed else "not finished", NONE]


def probe_rows(result: Result) -> list[list[str]]:
    """Per optimizer and shorter schedule tried, the longest first: mean final loss, reached or not.

    The first row of each is the race itself.
    """
    goal = next((s.final for s in result.standings if s.optimizer == YARDSTICK), math.inf)
    found = []
    for s in result.standings:
        tried = finals(s, result.probes, result.settings["seeds"])
        if tried:
            tried[result.settings["steps"]] = s.final
        found += [
            [
                s.optimizer,
                f"{length} steps",
                f"{loss:.4f}" if math.isfinite(loss) else "diverged",
                "reached" if loss <= goal else "not reached",
            ]
            for length, loss in sorted(tried.items(), reverse=True)
        ]
    return found


def _ratio(value: float | None, ratio: float | None, form: str, word: str) -> str:
    if value is None:
        return ""
    if ratio is None or abs(ratio - 1) < 0.005:
        return form.format(value)
    compared = f"{ratio:.2f}× {word}" if ratio > 1 else f"{1 / ratio:.2f}× more"
    return f"{form.format(value)} ({compared})"


def _ms(seconds: float | None) -> str:
    return f"{1e3 * (seconds or 0):.1f}"


def notes(result: Result) -> list[str]:
    """What a reader must know to read the table rightly."""
    seeds = result.settings["seeds"]
    lines = []
    if not result.complete:
        lines.append("The race was interrupted: only what was finished is shown.")
    if seeds > 1:
        lines.append(f"Losses are means over {seeds} seeds, ± standard deviation.")
    else:
        lines.append("One seed only: differences may be chance.")
    lines.append(
        "Times are steps × the time of a step in the least disturbed run, "
        "the model's by median and the optimizer's by mean."
    )
    if result.searched:
        lines.append(
            "Shortest schedule: the fewest steps, in twentieths of the race and by bisection, with "
            "which an optimizer trained on a schedule of that length ends at or below AdamW's "
            "final loss; × are shares of AdamW's own steps and time."
        )
    model = [s.model_seconds for s in result.standings if s.model_seconds]
    if model and max(model) > BUSY * min(model):
        lines.append(
            f"The model itself took from {_ms(min(model))} to {_ms(max(model))} ms: unless an "
            "optimizer changes the backward pass, the machine was busy and times are uncertain."
        )
    if any(standing.edge for standing in result.standings):
        lines.append(
            "edge: the best learning rate is the lowest or highest tried, "
            "so a better one may lie beyond."
        )
    lines += [f"{s.optimizer} failed: {s.failure}" for s in result.standings if s.failure]
    broken = {r.optimizer: r for r in result.probes if r.status == "failed"}
    lines += [f"{r.optimizer} failed in {r.schedule} steps: {r.message}" for r in broken.values()]
    return lines


def rich_table(result: Result, width: int) -> Table:
    """For the terminal: a row per optimizer where that fits, else a column per optimizer."""
    from rich.table import Table
    from rich.text import Text

    winner = result.winner.optimizer if result.winner is not None else None
    title = f"{result.settings['task']}, {result.settings['steps']} steps"
    cells = [columns(result), *rows(result)]
    styles = ["", *("bold" if s.optimizer == winner else "" for s in result.standings)]
    texts = [[Text(cell, style) for cell in row] for row, style in zip(cells, styles, strict=True)]
    natural = sum(max(text.cell_len for text in column) + 3 for column in zip(*texts, strict=True))
    if natural >= width:
        texts = [list(column) for column in zip(*texts, strict=True)]
    table = Table(title=Text(f"{title}, {result.settings['unit']}"), title_justify="left")
    for i, text in enumerate(texts[0]):
        table.add_column(text, justify="left" if i == 0 else "right", overflow="fold")
    for row in texts[1:]:
        table.add_row(*row)
    return table
