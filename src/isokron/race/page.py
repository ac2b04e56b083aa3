"""The race as one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from isokron.race.figures import colours, learning_rates, loss_by_step, loss_by_time
from isokron.race.plot import COLOURS, CSS, Plot, draw
from isokron.race.results import Result
from isokron.race.table import columns, notes, probe_rows, rows
from isokron.race.verdict import circumstances, verdict

FOLDER = Path(__file__).parent


def page(result: Result) -> str:
    """The whole page; every text of the user's is escaped."""
    settings = result.settings
    title = f"Optimizers on {settings['task']}"
    style = CSS.read_text(encoding="utf-8") + (FOLDER / "page.css").read_text(encoding="utf-8")
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{escape(verdict(result))}</p>',
            f'<p class="soft">{escape(circumstances(result))}</p>',
            '<div class="plots">',
            _figure(loss_by_step(result), _caption(result)),
            _figure(
                loss_by_time(result),
                "Seconds are steps × the time of a step in its least disturbed run.",
            ),
            "</div>",
            "<h2>Standings</h2>",
            _standings(result),
            _list(notes(result)),
            _shorter(result),
            '<div class="plots">',
            _figure(learning_rates(result), "Ring: best of its optimizer. ×: diverged or failed."),
            _samples(result),
            "</div>",
            _troubles(result),
            "<details><summary>Settings</summary>",
            _table(("setting", "value"), [[k, _words(v)] for k, v in settings.items()], "words"),
            "</details>",
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _caption(result: Result) -> str:
    seeds = "Thick: mean over seeds; thin: single seeds. " if result.settings["seeds"] > 1 else ""
    return f"{seeds}Dotted: AdamW's final loss."


def _figure(plot: Plot, caption: str) -> str:
    curves = [
        {"label": line.label, "points": line.points}
        for line in plot.lines
        if not line.thin and line.points and not plot.marks
    ]
    data = escape(json.dumps(curves))
    return (
        f'<figure data-curves="{data}" data-axis="{escape(plot.x_label)}">\n'
        f"<h3>{escape(plot.title)}</h3>\n{draw(plot)}\n"
        f'<figcaption><span class="readout">{escape(caption)}</span></figcaption>\n</figure>'
    )


def _standings(result: Result) -> str:
    palette = colours(result)
    winner = result.winner
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns(result))
    lines = []
    for standing, cells in zip(result.standings, rows(result), strict=True):
        won = winner is not None and winner.optimizer == standing.optimizer
        colour = f"c{palette[standing.optimizer] % COLOURS}"
        name = f'<th scope="row" class="{colour}">{escape(cells[0])}</th>'
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
        lines.append(f'<tr class="{"won" if won else "other"}">{name}{rest}</tr>')
    return _scroll("Standings", f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>")


def _samples(result: Result) -> str:
    """What the best model does, in words."""
    winner = result.winner
    if winner is None:
        return ""
    samples = [run.sample for run in result.runs_of(winner.optimizer, winner.best_lr) if run.sample]
    if not samples:
        return ""
    return (
        f"<figure><h3>What the model trained by {escape(winner.optimizer)} does</h3>"
        f"<pre>{escape(samples[0])}</pre></figure>"
    )


def _shorter(result: Result) -> str:
    """All that the search tried, so that a reader sees whether longer schedules did end lower."""
    cells = probe_rows(result)
    if not cells:
        return ""
    head = ("optimizer", "schedule", "final loss", "AdamW's loss")
    table = _table(head, cells, "")
    return f"<details><summary>Shorter schedules tried</summary>{table}</details>"


def _troubles(result: Result) -> str:
    bad = [run for run in (*result.runs, *result.probes) if run.status != "finished"]
    if not bad:
        return "<h2>Diverged and failed runs</h2><p>None.</p>"
    cells = [
        [
            *(run.optimizer, f"{run.lr:g}", str(run.seed)),
            *(str(run.schedule or result.settings["steps"]), run.status, run.message),
        ]
        for run in sorted(bad, key=lambda run: (run.optimizer, run.lr, run.seed))
    ]
    head = ("optimizer", "lr", "seed", "schedule", "outcome", "message")
    return f"<h2>Diverged and failed runs</h2>{_table(head, cells, 'words')}"


def _table(head: Sequence[str], cells: Iterable[Sequence[str]], kind: str) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in cells
    )
    inside = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return _scroll(head[0], inside, kind)


def _scroll(label: str, inside: str, kind: str = "") -> str:
    """A table that scrolls in its own box, by keyboard too."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f'<table class="{kind}">{inside}</table></div>'
    )


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
