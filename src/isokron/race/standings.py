"""What runs amount to: the best learning rate, how soon AdamW's loss is met, the standings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from isokron.race.optimizers import YARDSTICK
from isokron.race.results import Run, Standing


def mean_final(runs: Sequence[Run]) -> float:
    """Mean final loss over seeds; infinite as soon as one seed diverged or failed."""
    return statistics.fmean(run.final for run in runs) if runs else math.inf


def sweep(runs: Sequence[Run]) -> dict[float, float]:
    """Learning rate → mean final loss, rising in learning rate."""
    rates = sorted({run.lr for run in runs})
    return {lr: mean_final([run for run in runs if run.lr == lr]) for lr in rates}


def best_lr(finals: Mapping[float, float]) -> float | None:
    """The learning rate of the lowest loss; None if every one diverged."""
    finite = {lr: final for lr, final in finals.items() if math.isfinite(final)}
    return min(finite, key=lambda lr: finite[lr]) if finite else None


def mean_curve(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """Evaluation steps, and the loss there averaged over seeds."""
    shortest = min(runs, key=lambda run: len(run.eval_steps))
    columns = zip(*(run.eval_losses for run in runs), strict=False)
    return list(shortest.eval_steps), [statistics.fmean(column) for column in columns]


def first_crossing(steps: Sequence[int], losses: Sequence[float], target: float) -> float | None:
    """Where the curve, joined by straight lines, first is at or below target; None if never."""
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return float(steps[0])
            above = losses[i - 1]
            share = (above - target) / (above - loss)
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return None


def summarize(
    runs: Sequence[Run], sweeps: Mapping[str, Sequence[float]], seeds: int
) -> tuple[Standing, ...]:
    """One standing per optimizer of `sweeps`, from the learning rates that have all seeds.

    sweeps: optimizer → learning rates tried.
    """
    standings = [_standing(name, runs, tuple(sorted(lrs)), seeds) for name, lrs in sweeps.items()]
    yardstick = next((s for s in standings if s.optimizer == YARDSTICK), None)
    if yardstick is None or yardstick.best_lr is None:
        return tuple(standings)
    base = _reach(yardstick, runs, yardstick.final)
    return tuple(_compared(s, _reach(s, runs, yardstick.final), base) for s in standings)


def _at_best(standing: Standing, runs: Sequence[Run]) -> list[Run]:
    return [r for r in runs if (r.optimizer, r.lr) == (standing.optimizer, standing.best_lr)]


def _reach(standing: Standing, runs: Sequence[Run], target: float) -> tuple[float, float] | None:
    """Steps and seconds until the mean curve meets target."""
    if standing.best_lr is None:
        return None
    steps = first_crossing(*mean_curve(_at_best(standing, runs)), target)
    if steps is None:
        return None
    return steps, steps * standing.step_seconds


def _compared(
    standing: Standing, reach: tuple[float, float] | None, base: tuple[float, float] | None
) -> Standing:
    if reach is None or base is None:
        return standing
    return replace(
        standing,
        steps_to_reach=reach[0],
        seconds_to_reach=reach[1],
        fewer_steps=base[0] / reach[0] if reach[0] else None,
        less_time=base[1] / reach[1] if reach[1] else None,
    )


def _standing(name: str, runs: Sequence[Run], lrs: tuple[float, ...], seeds: int) -> Standing:
    mine = [run for run in runs if run.optimizer == name]
    diverged = sum(run.status == "diverged" for run in mine)
    failure = next((run.message for run in mine if run.status == "failed"), "")
    # an interrupted race may lack seeds; means over different seeds must not be compared
    whole = [lr for lr in lrs if sum(run.lr == lr for run in mine) == seeds]
    lr = best_lr(sweep([run for run in mine if run.lr in whole]))
    if lr is None or failure:
        return Standing(name, lrs, diverged=diverged, failure=failure)
    best = [run for run in mine if run.lr == lr]
    finals = [run.final for run in best]
    # a step costs the same at every learning rate, and other work on the machine only adds to it:
    # of the runs the least is nearest the truth
    timed = [run for run in mine if run.status == "finished"]
    return Standing(
        name,
        lrs,
        best_lr=lr,
        edge=lr in (min(lrs), max(lrs)),
        final=statistics.fmean(finals),
        spread=statistics.stdev(finals) if len(finals) > 1 else None,
        best=min(mean_curve(best)[1]),
        model_seconds=min(run.model_seconds for run in timed),
        optimizer_seconds=min(run.optimizer_seconds for run in timed),
        optimizer_bytes=best[0].optimizer_bytes,
        diverged=diverged,
    )
