"""The race as one HTML page that needs nothing but itself."""

from __future__ import annotations

from html import escape

from isokron.pages.html import bullets, document, figure, scroll, settings_table, table
from isokron.pages.plot import COLOURS
from isokron.race.figures import colours, learning_rates, loss_by_step, loss_by_time
from isokron.race.results import Result
from isokron.race.table import columns, notes, probe_rows, rows
from isokron.race.verdict import circumstances, verdict


def page(result: Result) -> str:
    """The whole page; every text of the user's is escaped."""
    settings = result.settings
    title = f"Optimizers on {settings['task']}"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{escape(verdict(result))}</p>',
            f'<p class="soft">{escape(circumstances(result))}</p>',
            '<div class="plots">',
            figure(loss_by_step(result), _caption(result)),
            figure(
                loss_by_time(result),
                "Seconds are steps × the time of a step in its least disturbed run.",
            ),
            "</div>",
            "<h2>Standings</h2>",
            _standings(result),
            bullets(notes(result)),
            _shorter(result),
            '<div class="plots">',
            figure(learning_rates(result), "Ring: best of its optimizer. ×: diverged or failed."),
            _samples(result),
            "</div>",
            _troubles(result),
            settings_table(settings),
        ]
    )
    return document(title, body)


def _caption(result: Result) -> str:
    seeds = "Thick: mean over seeds; thin: single seeds. " if result.settings["seeds"] > 1 else ""
    return f"{seeds}Dotted: AdamW's final loss."


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
    return scroll("Standings", f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>")


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
    return f"<details><summary>Shorter schedules tried</summary>{table(head, cells)}</details>"


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
    return f"<h2>Diverged and failed runs</h2>{table(head, cells, 'words')}"
