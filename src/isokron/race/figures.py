"""Which curves of a result are shown: loss by step, loss by time, and the learning-rate sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable

from isokron.pages.plot import Line, Mark, Plot
from isokron.race.optimizers import YARDSTICK
from isokron.race.results import Result, Standing
from isokron.race.standings import mean_curve, sweep

DECADE = 8.0  # a loss that falls by more than this reads better on a log scale
SETTLED = 0.12  # share of the steps after which the fall from the start no longer fills the plot


def colours(result: Result) -> dict[str, int]:
    """Optimizer → palette index: 0 for the yardstick, the others in order."""
    others = [s.optimizer for s in result.standings if s.optimizer != YARDSTICK]
    return {YARDSTICK: 0} | {name: i + 1 for i, name in enumerate(others)}


def loss_by_step(result: Result) -> Plot:
    """Evaluation loss against steps, each optimizer at its best learning rate."""
    lines = _curves(result, {s.optimizer: 1.0 for s in result.standings})
    return _loss_plot(result, "by-step", "step", "by training step", lines)


def loss_by_time(result: Result) -> Plot:
    """The same curves against seconds: steps × the optimizer's time of a step."""
    lines = _curves(result, {s.optimizer: s.step_seconds for s in result.standings})
    return _loss_plot(result, "by-time", "seconds of training", "by training time", lines)


def learning_rates(result: Result) -> Plot:
    """Final loss against learning rate; a cross at the top where a seed diverged."""
    palette = colours(result)
    lines, marks = [], []
    for standing in result.standings:
        name, colour = standing.optimizer, palette[standing.optimizer]
        finals = sweep(result.runs_of(name))
        points = [(lr, final) for lr, final in finals.items() if math.isfinite(final)]
        lines.append(Line(name, colour, points))
        for lr, final in finals.items():
            finite = math.isfinite(final)
            title = f"{name}, lr {lr:g}: {f'{final:.4f}' if finite else _why(result, name, lr)}"
            marks.append(Mark(colour, lr, final if finite else None, title, lr == standing.best_lr))
    values = [mark.y for mark in marks if mark.y is not None]
    return Plot(
        "sweep",
        "Final loss by learning rate",
        "Mean final evaluation loss over seeds for every learning rate tried. "
        "A ring marks the best one of each optimizer, a cross at the top a diverged run.",
        "learning rate",
        result.settings["unit"],
        lines,
        marks,
        x_log=True,
        y_log=_wide(values),
    )


def _why(result: Result, name: str, lr: float) -> str:
    statuses = {run.status for run in result.runs_of(name, lr)}
    return "failed" if "failed" in statuses else "diverged"


def _curves(result: Result, stretch: dict[str, float]) -> list[Line]:
    """Thin lines per seed below thick means; x is step × stretch."""
    palette = colours(result)
    thin, thick = [], []
    # the yardstick last, so that its dashes stay visible on top
    for standing in reversed(_finishers(result)):
        name, colour = standing.optimizer, palette[standing.optimizer]
        runs = result.runs_of(name, standing.best_lr)
        if len(runs) > 1:
            thin += [
                Line(name, colour, _points(r.eval_steps, r.eval_losses, stretch[name]), True)
                for r in runs
            ]
        thick.append(Line(name, colour, _points(*mean_curve(runs), stretch[name])))
    return thin + thick


def _finishers(result: Result) -> list[Standing]:
    return [standing for standing in result.standings if standing.best_lr is not None]


def _points(
    steps: Iterable[int], losses: Iterable[float], stretch: float
) -> list[tuple[float, float]]:
    return [(step * stretch, loss) for step, loss in zip(steps, losses, strict=True)]


def _loss_plot(result: Result, name: str, axis: str, words: str, lines: list[Line]) -> Plot:
    every = [y for line in lines for _, y in line.points]
    # crop the first fall, which is alike for all and would flatten the rest
    settled = [
        y
        for line in lines
        for y in [y for _, y in line.points][math.ceil(SETTLED * len(line.points)) :]
    ]
    low, high = (min(every), max(settled or every)) if every else (0.0, 1.0)
    log = _wide([low, high])
    margin = (high / low) ** 0.06 if log else 0.06 * (high - low) or 0.5
    bounds = (low / margin, high * margin) if log else (low - margin, high + margin)
    shown = ", ".join(
        f"{s.optimizer} ends at {s.final:.4f} with learning rate {s.best_lr:g}"
        for s in _finishers(result)
    )
    return Plot(
        name,
        f"Evaluation loss {words}",
        f"Each optimizer at its best learning rate: {shown or 'none has finished'}. "
        "Thick lines are means, thin ones single seeds, the dotted line is AdamW's final loss; "
        "the first steps may lie above the plot.",
        axis,
        result.settings["unit"],
        lines,
        y_log=log,
        y_range=bounds,
        goal=next((s.final for s in _finishers(result) if s.optimizer == YARDSTICK), None),
    )


def _wide(values: list[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > DECADE
