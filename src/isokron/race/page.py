"""The reports of a race: table, page, plots and JSON, all with the same numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from isokron.files import write_atomically
from isokron.race.results import TUNED, Result, Standing, Trial, mean_curve, trials
from isokron.race.search import quarter
from isokron.report import render
from isokron.report.charts import COLOURS, Line, Mark, Plot, standalone
from isokron.report.render import MISSING, finite, health_row, memory

WIDE = 8.0  # losses with a larger ratio of maximum to minimum have a log scale
SETTLED = 0.12  # fraction of the steps that is ignored in the range of the y-axis


def write_reports(result: Result, folder: Path) -> None:
    texts = {
        "race.json": as_json(result),
        "loss.svg": standalone(loss_plot(result, "step")),
        "index.html": page(result),
    }
    for name, text in texts.items():
        write_atomically(folder / name, [text.encode()])


def as_json(result: Result) -> str:
    """Settings, standings and runs, without training losses, which are in the files of runs."""
    value = asdict(result)
    for record in (*value["runs"], *value["probes"]):
        del record["train_losses"]
    return json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def page(result: Result) -> str:
    """The page as one self-contained HTML file."""
    winner = result.winner
    runs = result.runs_of(winner.optimizer, winner.setting) if winner is not None else []
    head, *rows = table(result)
    return render.render(
        "race.html",
        title=f"Optimizers on {result.settings['task']}",
        s=result.settings,
        winner=winner.optimizer if winner is not None else None,
        sentences=sentences(result),
        columns=head,
        rows=[(i % COLOURS, row) for i, row in enumerate(rows)],
        plots=(loss_plot(result, "step"), loss_plot(result, "time"), learning_rates(result)),
        samples=[run.sample for run in runs if run.sample],
        standings=result.standings,
        goal=result.goal,
        tuned=is_tuned(result),
        health=health(result),
        bad=[run for run in (*result.runs, *result.probes) if run.status != "finished"],
    )


def sentences(result: Result) -> list[str]:
    """A sentence on the result, one on the setting, then notes on the table."""
    tuned = is_tuned(result)
    text = render.render("race.txt", result=result, s=result.settings, tuned=tuned)
    return text.strip().split("\n")


def is_tuned(result: Result) -> bool:
    """Whether the learning rates of any optimizer were left to the race."""
    return TUNED in result.settings.get("learning rates", {}).values()


def table(result: Result) -> list[list[str]]:
    """The head, then a row per optimizer."""
    rows = [_row(standing, result) for standing in result.standings]
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def _row(s: Standing, result: Result) -> dict[str, str]:
    """Column → text; there are columns for shortest schedules only if they were searched."""
    count = sum(trial.seeds for trial in s.tried)
    missed = MISSING if result.goal is None else "not reached"
    seconds = (s.model_seconds, s.optimizer_seconds)
    row = {
        "optimizer": s.optimizer,
        "final loss": f"{s.final:.4f}" + (f" ± {s.spread:.4f}" if s.spread is not None else ""),
        **(_shortest_cells(s, result) if result.searched else {}),
        "steps to AdamW's loss": _share(s.steps_to_reach, s.steps_share, ".0f") or missed,
        "time to AdamW's loss": _share(s.seconds_to_reach, s.time_share, ".2f", " s") or missed,
        "best lr": f"{s.setting}" + (" (edge)" if s.edge else ""),
        "best loss": f"{s.best:.4f}",
        "step, ms: model + optimizer": " + ".join(f"{1e3 * value:.1f}" for value in seconds),
        "optimizer memory": memory(s.optimizer_bytes),
        "diverged": f"{s.diverged} of {count} runs" if s.diverged else "none",
    }
    # without a best setting there are no numbers, only the outcome
    if s.setting is None:
        diverged = count and s.diverged == count
        state = "failed" if s.failure else "diverged" if diverged else "not finished"
        unknown = [column for column in row if column not in ("optimizer", "diverged")]
        row |= dict.fromkeys(unknown, MISSING) | {"final loss": state}
    return row


def health(result: Result) -> list[list[str]]:
    """Statistics after the last step of each optimizer with its best setting, first seed."""
    rows = []
    for s in result.standings:
        runs = result.runs_of(s.optimizer, s.setting) if s.setting is not None else []
        if runs and runs[0].statistics:
            rows.append(health_row(s.optimizer, runs[0].statistics))
    return rows


def _share(value: float | None, share: float | None, form: str, unit: str = "") -> str:
    """A number of steps or seconds with its share of AdamW's own."""
    if value is None:
        return ""
    return f"{value:{form}}{unit}" + (f" ({share:.2f}×)" if share is not None else "")


def _shortest_cells(s: Standing, result: Result) -> dict[str, str]:
    """Steps and seconds of the shortest schedule, with their ratio to AdamW's."""
    steps, goal = result.settings["steps"], result.goal
    if goal is None:
        cells = (MISSING, MISSING)
    elif s is result.standings[0]:
        cells = (f"{steps} steps", f"{steps * s.step_seconds:.2f} s")
    elif s.shortest is not None:
        best = s.shortest
        cells = (
            f"{best.steps} steps ({best.share:.2f}×)",
            f"{best.seconds:.2f} s ({best.time_share:.2f}×)",
        )
    else:
        cells = ("not reached",) * 2 if s.final > goal else ("not finished", MISSING)
    return dict(zip(("shortest schedule", "time of that schedule"), cells, strict=True))


def loss_plot(result: Result, by: str) -> Plot:
    """Evaluation loss by "step" or "time" (steps × time of a step), with the best settings."""
    finishers = [s for s in result.standings if s.setting is not None]
    lines = []
    # AdamW's dashed line is drawn last, on top of the others; thin lines are below all means
    for s in reversed(finishers):
        colour = result.standings.index(s)
        runs = result.runs_of(s.optimizer, s.setting)
        single = [(run.eval_steps, run.eval_losses) for run in runs if len(runs) > 1]
        unit = 1.0 if by == "step" else s.step_seconds
        for i, curve in enumerate([mean_curve(runs), *single]):
            points = [(step * unit, loss) for step, loss in zip(*curve, strict=True)]
            lines.append(Line(s.optimizer, colour, points, thin=i > 0))
    lines.sort(key=lambda line: not line.thin)
    losses = [[loss for _, loss in line.points] for line in lines]
    low = min((min(curve) for curve in losses), default=0.0)
    # crop the initial fall, which would flatten the remaining curve
    high = max((max(curve[math.ceil(SETTLED * len(curve)) :]) for curve in losses), default=1.0)
    log = _wide([low, high])
    margin = (high / low) ** 0.06 if log else 0.06 * (high - low) or 0.5
    ends = [f"{s.optimizer} ends at {s.final:.4f} with learning rate {s.setting}"
            for s in finishers]  # fmt: skip
    return Plot(
        f"by-{by}",
        f"Evaluation loss by training {by}",
        f"Each optimizer with its best setting: {', '.join(ends) or 'none has finished'}. "
        "Thick lines are means, thin ones single seeds, the dotted line is AdamW's final loss.",
        "step" if by == "step" else "seconds of training",
        result.settings["unit"],
        lines,
        y_log=log,
        y_range=(low / margin, high * margin) if log else (low - margin, high + margin),
        goal=result.goal,
    )


def learning_rates(result: Result) -> Plot:
    """Final loss against learning rate; a cross at the top where no choice with it finished."""
    lines, marks = [], []
    full = result.settings["steps"]
    for colour, s in enumerate(result.standings):
        # only with the race's length, and with the length at which settings are compared first
        for steps in {full, quarter(full)}:
            best = _best_by_rate(s, steps, result)
            points = [(lr, t.loss) for lr, t in sorted(best.items()) if math.isfinite(t.loss)]
            lines.append(Line(s.optimizer, colour, points, thin=steps != full))
            for lr, trial in best.items():
                ended = math.isfinite(trial.loss)
                text = f"{trial.loss:.4f}" if ended else "failed" if s.failure else "diverged"
                title = f"{s.optimizer}, {trial.setting}, {steps} steps: {text}"
                ring = steps == full and trial.setting == s.setting
                marks.append(Mark(colour, lr, trial.loss if ended else None, title, ring))
    lines.sort(key=lambda line: not line.thin)
    return Plot(
        "sweep",
        "Final loss by learning rate",
        "Final evaluation loss by the learning rate of hidden matrices, with the best of the other "
        "choices tried at that rate: of tuned optimizers on the first seed, otherwise mean over "
        "seeds. Thick lines have all steps, thin ones a quarter of them. A ring marks the best "
        "setting of each optimizer, a cross at the top a rate with which no run finished.",
        "learning rate",
        result.settings["unit"],
        lines,
        marks,
        x_log=True,
        y_log=_wide([mark.y for mark in marks if mark.y is not None]),
    )


def _best_by_rate(s: Standing, steps: int, result: Result) -> dict[float, Trial]:
    """Of the settings of each learning rate the one with the lowest loss, or the best of all."""
    tried = s.tried
    if result.settings.get("learning rates", {}).get(s.optimizer) == TUNED:
        runs = (*result.runs, *result.probes)
        tried = trials(run for run in runs if run.optimizer == s.optimizer and run.seed == 0)
    # the last one of a rate counts
    tried = sorted(tried, key=lambda trial: (trial.setting == s.setting, -trial.loss))
    return {trial.setting.lr: trial for trial in tried if trial.steps == steps}


def _wide(values: list[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > WIDE
