"""The results of a race: its runs, and one standing per optimizer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PARTS = 20  # shorter schedules are tried in twentieths of the race's steps


@dataclass
class Run:
    """One training run.

    schedule: steps of a shorter schedule, in the search for the shortest; None for the race's.
    weights, batches: digests of the initial weights and of the batches in order.
    status: "finished", "diverged" (loss not finite or far above the start) or "failed".
    eval_steps, eval_losses: the evaluation curve, from step 0 to where the run ended.
    model_seconds, optimizer_seconds: median and mean time per step of a finished run.
    statistics: `optimizer.statistics()` after the last step; [] for optimizers without it.
    """

    optimizer: str
    lr: float
    seed: int
    schedule: int | None = None
    weights: str = ""
    batches: str = ""
    status: str = "finished"
    message: str = ""
    eval_steps: list[int] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)
    model_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    optimizer_bytes: int = 0
    sample: str = ""
    statistics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def final(self) -> float:
        """Evaluation loss after the last step; infinite if the run did not finish."""
        return self.eval_losses[-1] if self.status == "finished" else math.inf


@dataclass(frozen=True)
class Shortest:
    """The shortest schedule that reaches AdamW's loss; shares are relative to AdamW's race."""

    steps: int
    share: float
    seconds: float
    time_share: float


@dataclass
class Standing:
    """One optimizer's result, at its best learning rate.

    final, spread: mean and standard deviation over seeds of the final evaluation loss.
    steps_to_reach, seconds_to_reach: where the mean curve first meets AdamW's final loss.
    fewer_steps, less_time: AdamW's own steps and seconds to that loss, divided by these.
    edge: the best learning rate is the lowest or highest tried, so it may not be the best.
    schedules: steps of the shorter schedules tried → mean final loss.
    untried: lengths that remain in the search for the shortest schedule.
    shortest: None for AdamW, and if not searched, not found yet or never reached.
    """

    optimizer: str
    lrs: list[float]
    best_lr: float | None = None
    edge: bool = False
    final: float = math.inf
    spread: float | None = None
    best: float = math.inf
    steps_to_reach: float | None = None
    seconds_to_reach: float | None = None
    fewer_steps: float | None = None
    less_time: float | None = None
    model_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    optimizer_bytes: int = 0
    diverged: int = 0
    failure: str = ""
    schedules: Mapping[int, float] = field(default_factory=dict)
    untried: list[int] = field(default_factory=list)
    shortest: Shortest | None = None

    @property
    def step_seconds(self) -> float:
        return self.model_seconds + self.optimizer_seconds


@dataclass
class Result:
    """A race: its settings, all runs, and one standing per optimizer, that of AdamW first.

    probes: runs on shorter schedules, not in `runs`. searched: whether they were requested.
    """

    settings: Mapping[str, Any]
    runs: list[Run]
    probes: list[Run]
    complete: bool
    searched: bool
    standings: list[Standing] = field(default_factory=list)

    @property
    def winner(self) -> Standing | None:
        """The lowest final loss; None if no optimizer finished."""
        ranked = [s for s in self.standings if math.isfinite(s.final)]
        return min(ranked, key=lambda s: s.final, default=None)

    @property
    def goal(self) -> float | None:
        """AdamW's final loss; None if it has none."""
        final = self.standings[0].final
        return final if math.isfinite(final) else None

    def runs_of(self, optimizer: str, lr: float | None = None) -> list[Run]:
        """Runs of one optimizer, at one learning rate or at all, by learning rate and seed."""
        chosen = [r for r in self.runs if r.optimizer == optimizer and lr in (None, r.lr)]
        return sorted(chosen, key=lambda run: (run.lr, run.seed))


def mean_finals(runs: Iterable[Run], by: str, seeds: int) -> dict[Any, float]:
    """Mean final loss by "lr" or "schedule", in ascending order; infinite if a seed diverged."""
    groups: dict[Any, list[float]] = {}
    for run in runs:
        groups.setdefault(getattr(run, by), []).append(run.final)
    # only complete groups: an interrupted race may lack seeds, and means would not compare
    return {
        value: statistics.fmean(finals)
        for value, finals in sorted(groups.items())
        if len(finals) == seeds
    }


def mean_curve(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """Evaluation steps of finished runs, and the loss there averaged over seeds."""
    columns = zip(*(run.eval_losses for run in runs), strict=True)
    return runs[0].eval_steps, [statistics.fmean(column) for column in columns]


def first_crossing(steps: Sequence[int], losses: Sequence[float], target: float) -> float | None:
    """Where the curve, joined by straight lines, first is at or below target; None if never."""
    if losses[0] <= target:
        return float(steps[0])
    for (start, above), (end, loss) in pairwise(zip(steps, losses, strict=True)):
        if loss <= target:
            return start + (above - target) / (above - loss) * (end - start)
    return None


def summarize(
    settings: Mapping[str, Any],
    runs: Collection[Run],
    complete: bool = True,
    searched: bool = False,
) -> Result:
    """The result of these runs: each optimizer at its best learning rate, compared with AdamW."""
    probes = [run for run in runs if run.schedule is not None]
    race_runs = [run for run in runs if run.schedule is None]
    # earlier searches are shown, asked for or not
    result = Result(settings, race_runs, probes, complete, searched or bool(probes))
    result.standings = [_standing(name, result) for name in settings["optimizers"]]
    # AdamW comes first: the others are compared with its steps to its final loss
    adamw = result.standings[0]
    for s in result.standings:
        if s.best_lr is not None and adamw.best_lr is not None:
            _compare_(s, adamw, result)
            if result.searched and s is not adamw and s.final <= adamw.final:
                _search_(s, adamw, settings["steps"])
    return result


def _standing(name: str, result: Result) -> Standing:
    runs, seeds = result.runs_of(name), result.settings["seeds"]
    lrs = sorted({run.lr for run in runs})
    diverged = sum(run.status == "diverged" for run in runs)
    failure = next((run.message for run in runs if run.status == "failed"), "")
    finals = mean_finals(runs, "lr", seeds)
    lr = min(
        (lr for lr in finals if math.isfinite(finals[lr])), key=finals.__getitem__, default=None
    )
    if lr is None:
        return Standing(name, lrs, diverged=diverged, failure=failure)
    best = result.runs_of(name, lr)
    # a step takes the same time at every learning rate, and other load only adds to it, so the
    # minimum over runs is the best estimate
    timed = [run for run in runs if run.status == "finished"]
    probes = [run for run in result.probes if (run.optimizer, run.lr) == (name, lr)]
    return Standing(
        name,
        lrs,
        best_lr=lr,
        edge=lr in (min(lrs), max(lrs)),
        final=finals[lr],
        spread=statistics.stdev(run.final for run in best) if seeds > 1 else None,
        best=min(mean_curve(best)[1]),
        model_seconds=min(run.model_seconds for run in timed),
        optimizer_seconds=min(run.optimizer_seconds for run in timed),
        optimizer_bytes=best[0].optimizer_bytes,
        diverged=diverged,
        failure=failure,
        schedules=mean_finals(probes, "schedule", seeds),
    )


def _compare_(s: Standing, adamw: Standing, result: Result) -> None:
    """Set the steps and seconds to AdamW's final loss."""
    curve = mean_curve(result.runs_of(s.optimizer, s.best_lr))
    steps = s.steps_to_reach = first_crossing(*curve, adamw.final)
    if steps is not None:
        s.seconds_to_reach = steps * s.step_seconds
    # the untrained model may reach it at step 0
    if steps and s.seconds_to_reach and adamw.steps_to_reach:
        s.fewer_steps = adamw.steps_to_reach / steps
        s.less_time = adamw.steps_to_reach * adamw.step_seconds / s.seconds_to_reach


def _search_(s: Standing, adamw: Standing, steps: int) -> None:
    """Set the lengths still to be tried or, if there are none, the shortest schedule."""
    reached = min([steps, *(n for n, loss in s.schedules.items() if loss <= adamw.final)])
    # longer schedules are assumed to end lower, so lengths below one that missed are skipped
    missed = max((n for n, loss in s.schedules.items() if loss > adamw.final), default=0)
    lengths = {max(1, round(i * steps / PARTS)) for i in range(1, PARTS)}
    s.untried = sorted(n for n in lengths if missed < n < reached)
    if not s.untried:
        # times per step come from the race, in which optimizers took turns; a step takes the
        # same time on every schedule
        seconds = reached * s.step_seconds
        time_share = seconds / (steps * adamw.step_seconds)
        s.shortest = Shortest(reached, reached / steps, seconds, time_share)
