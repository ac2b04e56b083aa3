"""The runs of a race and what they amount to: one standing per optimizer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from isokron.optimizers_by_name import YARDSTICK

PARTS = 20  # of the race's steps: shorter schedules are tried in twentieths


class Key(NamedTuple):
    """Which run of a race. schedule: as of Run."""

    optimizer: str
    lr: float
    seed: int
    schedule: int | None = None


@dataclass(frozen=True)
class Run:
    """One training run.

    status: "finished", "diverged" (loss not finite or far above the start) or "failed".
    eval_steps, eval_losses: the evaluation curve, from step 0 as far as the run went.
    model_seconds, optimizer_seconds: per step; the median of forward and backward, and the mean of
    the optimizer's part, some of whose steps cost more than others.
    weights, batches: digests of the initial weights and of the batches in order.
    schedule: steps of its own schedule, in the search for the shortest; None for the race's.
    """

    optimizer: str
    lr: float
    seed: int
    status: str
    message: str
    eval_steps: tuple[int, ...]
    eval_losses: tuple[float, ...]
    train_losses: tuple[float, ...]
    model_seconds: float
    optimizer_seconds: float
    optimizer_bytes: int
    weights: str
    batches: str
    sample: str = ""
    schedule: int | None = None

    @property
    def key(self) -> Key:
        return Key(self.optimizer, self.lr, self.seed, self.schedule)

    @property
    def final(self) -> float:
        """Evaluation loss after the last step; infinite if the run did not get there."""
        return self.eval_losses[-1] if self.status == "finished" else math.inf

    @property
    def step_seconds(self) -> float:
        return self.model_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class Shortest:
    """The shortest schedule tried with which an optimizer ends at or below AdamW's final loss.

    share, time_share: of AdamW's steps and seconds for the full race. final: mean over seeds.
    """

    steps: int
    share: float
    seconds: float
    time_share: float | None
    final: float


@dataclass(frozen=True)
class Standing:
    """One optimizer's result, at its best learning rate.

    final, spread: mean and standard deviation over seeds of the final evaluation loss.
    steps_to_reach, seconds_to_reach: where the mean curve first meets AdamW's final loss.
    fewer_steps, less_time: AdamW's own steps and seconds to that loss, divided by these.
    edge: the best learning rate is the lowest or highest tried, so it may not be the best.
    shortest: None for AdamW, and where not searched, not found yet or out of reach.
    """

    optimizer: str
    lrs: tuple[float, ...]
    best_lr: float | None = None
    edge: bool = False
    final: float = math.inf
    spread: float | None = None
    best: float = math.inf
    steps_to_reach: float | None = None
    seconds_to_reach: float | None = None
    fewer_steps: float | None = None
    less_time: float | None = None
    model_seconds: float | None = None
    optimizer_seconds: float | None = None
    optimizer_bytes: int | None = None
    diverged: int = 0
    failure: str = ""
    shortest: Shortest | None = None

    @property
    def step_seconds(self) -> float:
        return (self.model_seconds or 0.0) + (self.optimizer_seconds or 0.0)


@dataclass(frozen=True)
class Result:
    """A race: its settings, all runs, and one standing per optimizer in the order of the call.

    probes: the runs on shorter schedules, apart from `runs`; searched: they were asked for.
    """

    settings: Mapping[str, Any]
    runs: tuple[Run, ...]
    standings: tuple[Standing, ...]
    complete: bool = True
    probes: tuple[Run, ...] = ()
    searched: bool = False

    @property
    def winner(self) -> Standing | None:
        """The lowest final loss; None if no optimizer finished."""
        ranked = [s for s in self.standings if math.isfinite(s.final)]
        return min(ranked, key=lambda s: s.final, default=None)

    def runs_of(self, optimizer: str, lr: float | None = None) -> list[Run]:
        """Runs of one optimizer, at one learning rate or at all, by learning rate and seed."""
        chosen = [r for r in self.runs if r.optimizer == optimizer and lr in (None, r.lr)]
        return sorted(chosen, key=lambda run: (run.lr, run.seed))


def goal(standings: Sequence[Standing]) -> float | None:
    """AdamW's final loss; None if it has none."""
    finals = [s.final for s in standings if s.optimizer == YARDSTICK]
    return finals[0] if finals and math.isfinite(finals[0]) else None


def mean_final(runs: Sequence[Run]) -> float:
    """Mean final loss over seeds; infinite as soon as one seed diverged or failed."""
    return statistics.fmean(run.final for run in runs) if runs else math.inf


def sweep(runs: Sequence[Run]) -> dict[float, float]:
    """Learning rate → mean final loss, by rising learning rate."""
    rates = sorted({run.lr for run in runs})
    return {lr: mean_final([run for run in runs if run.lr == lr]) for lr in rates}


def best_lr(finals: Mapping[float, float]) -> float | None:
    """The learning rate of the lowest loss; None if every one diverged."""
    finite = {lr: final for lr, final in finals.items() if math.isfinite(final)}
    return min(finite, key=finite.__getitem__, default=None)


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
            return steps[i - 1] + (above - target) / (above - loss) * (steps[i] - steps[i - 1])
    return None


def summarize(
    runs: Sequence[Run], sweeps: Mapping[str, Sequence[float]], seeds: int
) -> tuple[Standing, ...]:
    """One standing per optimizer of `sweeps` (its learning rates tried), compared with AdamW."""
    by_name = {name: [run for run in runs if run.optimizer == name] for name in sweeps}
    standings = {
        name: _standing(name, by_name[name], tuple(sorted(lrs)), seeds)
        for name, lrs in sweeps.items()
    }
    target = goal(tuple(standings.values()))
    if target is None:
        return tuple(standings.values())
    reached = {}
    for name, standing in standings.items():
        at_best = [run for run in by_name[name] if run.lr == standing.best_lr]
        steps = first_crossing(*mean_curve(at_best), target) if at_best else None
        if steps is not None:
            reached[name] = (steps, steps * standing.step_seconds)
    base_steps, base_seconds = reached[YARDSTICK]
    for name, (steps, seconds) in reached.items():
        standings[name] = replace(
            standings[name],
            steps_to_reach=steps,
            seconds_to_reach=seconds,
            fewer_steps=base_steps / steps if steps else None,
            less_time=base_seconds / seconds if seconds else None,
        )
    return tuple(standings.values())


def _standing(name: str, runs: Sequence[Run], lrs: tuple[float, ...], seeds: int) -> Standing:
    diverged = sum(run.status == "diverged" for run in runs)
    failure = next((run.message for run in runs if run.status == "failed"), "")
    # an interrupted race may lack seeds; means over different seeds must not be compared
    complete = [lr for lr in lrs if sum(run.lr == lr for run in runs) == seeds]
    lr = best_lr(sweep([run for run in runs if run.lr in complete]))
    if lr is None or failure:
        return Standing(name, lrs, diverged=diverged, failure=failure)
    best = [run for run in runs if run.lr == lr]
    finals = [run.final for run in best]
    # a step costs the same at every learning rate, and other work on the machine only adds to it:
    # the least of all runs is nearest the truth
    timed = [run for run in runs if run.status == "finished"]
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


def lengths(steps: int) -> list[int]:
    """The schedules that may be tried, up to the race's own; every length below 20 steps."""
    return sorted({max(1, round(i * steps / PARTS)) for i in range(1, PARTS + 1)})


def bisect(candidates: Sequence[int], reached: Mapping[int, bool]) -> tuple[int, int | None]:
    """The shortest length known to reach, and the one to try next: None once the search is over.

    candidates: rising, the last known to reach.
    """
    # a longer schedule is assumed to end lower: no length below one that missed is tried
    missed, hit = -1, len(candidates) - 1
    while hit - missed > 1:
        middle = (missed + hit) // 2
        if candidates[middle] not in reached:
            return candidates[hit], candidates[middle]
        missed, hit = (missed, middle) if reached[candidates[middle]] else (middle, hit)
    return candidates[hit], None


def schedule_losses(standing: Standing, probes: Iterable[Run], seeds: int) -> dict[int, float]:
    """Length → mean final loss at the optimizer's best learning rate, where all seeds are there."""
    # infinite where one diverged; a failed run, which will be tried again, leaves it open
    by_length: dict[int, list[Run]] = {}
    for run in probes:
        at_best = (run.optimizer, run.lr) == (standing.optimizer, standing.best_lr)
        if at_best and run.schedule is not None and run.status != "failed":
            by_length.setdefault(run.schedule, []).append(run)
    return {n: mean_final(runs) for n, runs in sorted(by_length.items()) if len(runs) == seeds}


def searches(
    standings: Sequence[Standing], probes: Sequence[Run], steps: int, seeds: int
) -> dict[str, tuple[int, int | None]]:
    """Optimizer → (shortest so far, next length), of those that reach AdamW's loss in the race."""
    target = goal(standings)
    states = {}
    for s in standings:
        if target is not None and s.optimizer != YARDSTICK and s.final <= target:
            losses = schedule_losses(s, probes, seeds)
            reached = {length: loss <= target for length, loss in losses.items()}
            states[s.optimizer] = bisect(lengths(steps), reached)
    return states


def with_shortest(
    standings: Sequence[Standing], probes: Sequence[Run], steps: int, seeds: int
) -> tuple[Standing, ...]:
    """The standings, with the shortest schedules of the searches that are over."""
    # times are those of the race, in which optimizers took turns; those of the probes are not
    # comparable, and a step costs the same on every schedule
    adamw_seconds = sum(steps * s.step_seconds for s in standings if s.optimizer == YARDSTICK)
    result = {s.optimizer: s for s in standings}
    for name, (length, following) in searches(standings, probes, steps, seeds).items():
        if following is None:
            standing = result[name]
            seconds = length * standing.step_seconds
            time_share = seconds / adamw_seconds if adamw_seconds else None
            final = schedule_losses(standing, probes, seeds).get(length, standing.final)
            shortest = Shortest(length, length / steps, seconds, time_share, final)
            result[name] = replace(standing, shortest=shortest)
    return tuple(result.values())
