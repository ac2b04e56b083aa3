"""The results of a race: its runs, and one standing per optimizer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from isokron.race.search import Setting, quarter

TUNED = "tuned"  # in settings, for an optimizer whose learning rates were not given
PARTS = 20  # shorter schedules are tried in twentieths of the race's steps


@dataclass
class Run:
    """One training run.

    lr, ratio, decay, beta2: as in `Setting`.
    steps: length of the schedule, the race's or shorter.
    weights, batches: digests of the initial weights and of the batches in order.
    status: "finished", "diverged" (loss not finite or far above the start) or "failed".
    eval_steps, eval_losses: the evaluation curve, from step 0 to where the run ended.
    model_seconds, optimizer_seconds: median and mean time per step of a finished run.
    statistics: `optimizer.statistics()` after the last step; [] for optimizers without it.
    """

    optimizer: str
    lr: float
    seed: int
    steps: int
    ratio: float = 1
    decay: float | None = None
    beta2: float | None = None
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
    def setting(self) -> Setting:
        return Setting(self.optimizer, self.lr, self.ratio, self.decay, self.beta2)

    @property
    def final(self) -> float:
        """Evaluation loss after the last step; infinite if the run did not finish."""
        return self.eval_losses[-1] if self.status == "finished" else math.inf


@dataclass(frozen=True)
class Trial:
    """The runs of a setting on one schedule; loss: their mean, infinite if one did not finish."""

    setting: Setting
    steps: int
    seeds: int
    loss: float


@dataclass(frozen=True)
class Shortest:
    """The shortest schedule that reaches AdamW's loss; shares are relative to AdamW's race."""

    steps: int
    share: float
    seconds: float
    time_share: float


@dataclass
class Standing:
    """One optimizer's result, with its best setting.

    tried: everything that was run; setting: the best at full length, None if none has finished.
    final, spread: mean and standard deviation over seeds of the final evaluation loss.
    steps_to_reach, seconds_to_reach: where the mean curve first meets AdamW's final loss.
    steps_share, time_share: these as shares of AdamW's own steps and seconds to that loss.
    edge: the best learning rate is the lowest or highest tried, so it may not be the best.
    schedules: steps of the shorter schedules tried with the best setting → mean final loss.
    untried: lengths that remain in the search for the shortest schedule.
    shortest: None for AdamW, and if not searched, not found yet or never reached.
    """

    optimizer: str
    tried: list[Trial]
    setting: Setting | None = None
    edge: bool = False
    final: float = math.inf
    spread: float | None = None
    best: float = math.inf
    steps_to_reach: float | None = None
    seconds_to_reach: float | None = None
    steps_share: float | None = None
    time_share: float | None = None
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

    probes: runs on shorter schedules, not in `runs`. searched: whether the shortest was asked for.
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

    def runs_of(self, optimizer: str, setting: Setting | None = None) -> list[Run]:
        """Runs of full length of one optimizer, with one setting or all, by seed."""
        chosen = [r for r in self.runs if r.optimizer == optimizer and setting in (None, r.setting)]
        return sorted(chosen, key=lambda run: (run.lr, run.seed))


def trials(runs: Iterable[Run]) -> list[Trial]:
    """Runs by setting and steps: the longest schedules first, then the lowest losses."""
    finals: dict[tuple[Setting, int], list[float]] = {}
    for run in runs:
        finals.setdefault((run.setting, run.steps), []).append(run.final)
    tried = [Trial(*key, len(values), statistics.fmean(values)) for key, values in finals.items()]
    return sorted(tried, key=lambda trial: (-trial.steps, trial.loss, str(trial.setting)))


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
    """The result of these runs: each optimizer with its best setting, compared with AdamW."""
    steps = settings["steps"]
    probes = [run for run in runs if run.steps != steps]
    race_runs = [run for run in runs if run.steps == steps]
    # earlier searches are shown, asked for or not; tuning needs a quarter of the steps only
    searched |= any(run.steps != quarter(steps) for run in probes)
    result = Result(settings, race_runs, probes, complete, searched)
    result.standings = [_standing(name, result) for name in settings["optimizers"]]
    # AdamW comes first: the others are compared with its steps to its final loss
    adamw = result.standings[0]
    for s in result.standings:
        if s.setting is not None and adamw.setting is not None:
            _compare_(s, adamw, result)
            if result.searched and s is not adamw and s.final <= adamw.final:
                _search_(s, adamw, steps)
    return result


def _standing(name: str, result: Result) -> Standing:
    steps, seeds = result.settings["steps"], result.settings["seeds"]
    runs = [run for run in (*result.runs, *result.probes) if run.optimizer == name]
    tried = trials(runs)
    diverged = sum(run.status == "diverged" for run in runs)
    failure = next((run.message for run in runs if run.status == "failed"), "")
    # only with all seeds: an interrupted race may lack some, and means would not compare
    complete = [trial for trial in tried if trial.seeds == seeds]
    finished = [t for t in complete if t.steps == steps and math.isfinite(t.loss)]
    if not finished:
        return Standing(name, tried, diverged=diverged, failure=failure)
    setting, final = finished[0].setting, finished[0].loss
    best = result.runs_of(name, setting)
    # a step takes the same time with every setting, and other load only adds to it, so the
    # minimum over runs is the best estimate
    timed = [run for run in result.runs_of(name) if run.status == "finished"]
    rates = [trial.setting.lr for trial in tried if trial.setting.ratio == setting.ratio]
    return Standing(
        name,
        tried,
        setting,
        edge=setting.lr in (min(rates), max(rates)),
        final=final,
        spread=statistics.stdev(run.final for run in best) if seeds > 1 else None,
        best=min(mean_curve(best)[1]),
        model_seconds=min(run.model_seconds for run in timed),
        optimizer_seconds=min(run.optimizer_seconds for run in timed),
        optimizer_bytes=best[0].optimizer_bytes,
        diverged=diverged,
        failure=failure,
        schedules={t.steps: t.loss for t in complete if t.setting == setting and t.steps < steps},
    )


def _compare_(s: Standing, adamw: Standing, result: Result) -> None:
    """Set the steps and seconds to AdamW's final loss."""
    curve = mean_curve(result.runs_of(s.optimizer, s.setting))
    steps = s.steps_to_reach = first_crossing(*curve, adamw.final)
    if steps is not None:
        s.seconds_to_reach = steps * s.step_seconds
    # the untrained model may reach it at step 0
    if steps and s.seconds_to_reach and adamw.steps_to_reach:
        s.steps_share = steps / adamw.steps_to_reach
        s.time_share = s.seconds_to_reach / (adamw.steps_to_reach * adamw.step_seconds)


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
