"""A race as table, page and plots: the same numbers in the terminal and in the browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isokron.files import write_atomically
from isokron.optimizers_by_name import YARDSTICK
from isokron.race.results import Result, Standing, goal, mean_curve, schedule_losses, sweep
from isokron.race.run_files import as_csv, as_json
from isokron.report import render
from isokron.report.charts import COLOURS, Line, Mark, Plot, standalone
from isokron.report.render import MISSING, memory

WIDE = 8.0  # a loss that falls by more than this factor reads better on a log scale
SETTLED = 0.12  # share of the steps after which the fall from the start no longer fills the plot
AXES = {"step": "step", "time": "seconds of training"}


def write_reports(result: Result, folder: Path) -> None:
    texts = {
        "race.json": as_json(result),
        "race.csv": as_csv(result),
        "loss.svg": standalone(loss_plot(result, "step")),
        "index.html": page(result),
    }
    for name, text in texts.items():
        write_atomically(folder / name, [text.encode()])


def page(result: Result) -> str:
    """The page as one HTML file that needs nothing else."""
    palette, winner = colours(result), result.winner
    runs = result.runs_of(winner.optimizer, winner.best_lr) if winner is not None else []
    head, *rows = table(result)
    return render.render(
        "race.html",
        title=f"Optimizers on {result.settings['task']}",
        s=result.settings,
        winner=winner.optimizer if winner is not None else None,
        sentences=sentences(result),
        columns=head,
        rows=[(palette[row[0]] % COLOURS, row) for row in rows],
        plots=(loss_plot(result, "step"), loss_plot(result, "time"), learning_rates(result)),
        samples=[run.sample for run in runs if run.sample],
        goal=goal(result.standings),
        tried=[
            (s, schedule_losses(s, result.probes, result.settings["seeds"]))
            for s in result.standings
        ],
        bad=[run for run in (*result.runs, *result.probes) if run.status != "finished"],
    )


def sentences(result: Result) -> list[str]:
    """The verdict and the circumstances in a sentence each, then notes on how to read the table."""
    return plain_text("race.txt", result=result, s=result.settings).split("\n")


def plain_text(template: str, **context: Any) -> str:
    """A template of isokron.report that is not HTML."""
    text: str = render.environment().get_template(template).render(**context)
    return text.strip()


def table(result: Result) -> list[list[str]]:
    """The head, then a row per optimizer."""
    rows = [_row(standing, result) for standing in result.standings]
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def _row(s: Standing, result: Result) -> dict[str, str]:
    """Column → text; shortest schedules have columns only where they were searched."""
    runs = result.runs_of(s.optimizer)
    missed = MISSING if goal(result.standings) is None else "not reached"
    seconds = (s.model_seconds or 0.0, s.optimizer_seconds or 0.0)
    row = {
        "optimizer": s.optimizer,
        "best lr": f"{s.best_lr or 0.0:g}" + (" (edge)" if s.edge else ""),
        "final loss": f"{s.final:.4f}" + (f" ± {s.spread:.4f}" if s.spread is not None else ""),
        "best loss": f"{s.best:.4f}",
        "steps to AdamW's loss": _ratio(s.steps_to_reach, s.fewer_steps, "", "fewer") or missed,
        "time to AdamW's loss": _ratio(s.seconds_to_reach, s.less_time, " s", "less") or missed,
        **(_shortest_cells(s, result) if result.searched else {}),
        "step, ms: model + optimizer": " + ".join(f"{1e3 * value:.1f}" for value in seconds),
        "optimizer memory": memory(s.optimizer_bytes or 0),
        "diverged": f"{s.diverged} of {len(runs)} runs" if s.diverged else "none",
    }
    # what has no best learning rate has no numbers: only the outcome is told
    if s.best_lr is None:
        tried = len(runs) and s.diverged == len(runs)
        state = "failed" if s.failure else "diverged" if tried else "not finished"
        unknown = [column for column in row if column not in ("optimizer", "diverged")]
        row |= dict.fromkeys(unknown, MISSING) | {"final loss": state}
    return row


def _ratio(value: float | None, ratio: float | None, unit: str, word: str) -> str:
    if value is None:
        return ""
    text = f"{value:.{2 if unit else 0}f}{unit}"
    # a tie is no gain
    if ratio is None or abs(ratio - 1) < 0.005:
        return text
    return f"{text} ({f'{ratio:.2f}× {word}' if ratio > 1 else f'{1 / ratio:.2f}× more'})"


def _shortest_cells(standing: Standing, result: Result) -> dict[str, str]:
    """Steps and seconds of the shortest schedule, and what share they are of AdamW's."""
    steps, shortest, target = result.settings["steps"], standing.shortest, goal(result.standings)
    if target is None:
        cells = (MISSING, MISSING)
    elif standing.optimizer == YARDSTICK:
        cells = (f"{steps} steps", f"{steps * standing.step_seconds:.2f} s")
    elif shortest is not None:
        share = f" ({shortest.time_share:.2f}×)" if shortest.time_share is not None else ""
        steps_cell = f"{shortest.steps} steps ({shortest.share:.2f}×)"
        cells = (steps_cell, f"{shortest.seconds:.2f} s{share}")
    elif standing.final > target:
        cells = ("not reached", "not reached")
    else:
        statuses = {run.status for run in result.probes if run.optimizer == standing.optimizer}
        cells = ("failed" if "failed" in statuses else "not finished", MISSING)
    return dict(zip(("shortest schedule", "time of that schedule"), cells, strict=True))


def colours(result: Result) -> dict[str, int]:
    """Optimizer → palette index: 0 for the yardstick, the others in order."""
    others = [s.optimizer for s in result.standings if s.optimizer != YARDSTICK]
    return {YARDSTICK: 0} | {name: i + 1 for i, name in enumerate(others)}


def loss_plot(result: Result, by: str) -> Plot:
    """Evaluation loss by "step" or "time" (steps × time of a step), at the best learning rates."""
    finishers = [standing for standing in result.standings if standing.best_lr is not None]
    # the yardstick last, so that its dashes stay visible on top; thin lines below all means
    lines = [line for s in reversed(finishers) for line in _curves(s, result, by)]
    lines.sort(key=lambda line: not line.thin)
    losses = [[y for _, y in line.points] for line in lines]
    values = [y for curve in losses for y in curve]
    # crop the first fall, which is alike for all and would flatten the rest
    settled = [y for curve in losses for y in curve[math.ceil(SETTLED * len(curve)) :]]
    low, high = (min(values), max(settled or values)) if values else (0.0, 1.0)
    log = _wide([low, high])
    margin = (high / low) ** 0.06 if log else 0.06 * (high - low) or 0.5
    y_range = (low / margin, high * margin) if log else (low - margin, high + margin)
    ends = [f"{s.optimizer} ends at {s.final:.4f} with learning rate {s.best_lr:g}"
            for s in finishers]  # fmt: skip
    text = (
        f"Each optimizer at its best learning rate: {', '.join(ends) or 'none has finished'}. "
        "Thick lines are means, thin ones single seeds, the dotted line is AdamW's final loss."
    )
    labels = (f"by-{by}", f"Evaluation loss by training {by}", text, AXES[by])
    options: Any = {"y_log": log, "y_range": y_range, "goal": goal(result.standings)}
    return Plot(*labels, result.settings["unit"], lines, **options)


def _curves(standing: Standing, result: Result, by: str) -> list[Line]:
    """A thin line per seed, if there are several, and the thick mean."""
    name, unit = standing.optimizer, 1.0 if by == "step" else standing.step_seconds
    runs = result.runs_of(name, standing.best_lr)
    curves: list[tuple[Sequence[int], Sequence[float]]] = [mean_curve(runs)]
    curves += [(run.eval_steps, run.eval_losses) for run in runs if len(runs) > 1]
    colour = colours(result)[name]
    return [
        Line(name, colour, [(x * unit, y) for x, y in zip(*curve, strict=True)], thin=i > 0)
        for i, curve in enumerate(curves)
    ]


def learning_rates(result: Result) -> Plot:
    """Final loss against learning rate; a cross at the top where a seed diverged."""
    palette = colours(result)
    lines, marks = [], []
    for standing in result.standings:
        name, colour = standing.optimizer, palette[standing.optimizer]
        losses = sweep(result.runs_of(name))
        finite = {lr: loss for lr, loss in losses.items() if math.isfinite(loss)}
        lines.append(Line(name, colour, list(finite.items())))
        for lr in losses:
            statuses = {run.status for run in result.runs_of(name, lr)}
            trouble = "failed" if "failed" in statuses else "diverged"
            title = f"{name}, lr {lr:g}: {f'{finite[lr]:.4f}' if lr in finite else trouble}"
            marks.append(Mark(colour, lr, finite.get(lr), title, lr == standing.best_lr))
    text = (
        "Mean final evaluation loss over seeds for every learning rate tried. "
        "A ring marks the best one of each optimizer, a cross at the top a diverged run."
    )
    labels = ("sweep", "Final loss by learning rate", text, "learning rate")
    log = _wide([mark.y for mark in marks if mark.y is not None])
    return Plot(*labels, result.settings["unit"], lines, marks, x_log=True, y_log=log)


def _wide(values: list[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > WIDE
