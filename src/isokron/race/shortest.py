"""The shortest schedule of its own with which an optimizer still ends at AdamW's final loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from isokron.race.optimizers import YARDSTICK
from isokron.race.results import Run, Shortest, Standing
from isokron.race.standings import mean_final

PARTS = 20  # of the race's steps: lengths are tried in twentieths


def lengths(steps: int) -> list[int]:
    """The schedules that may be tried, rising to the race's own; every length below 20 steps."""
    return sorted({max(1, round(i * steps / PARTS)) for i in range(1, PARTS + 1)})


def bisect(tried: Sequence[int], reached: Mapping[int, bool]) -> tuple[int, int | None]:
    """The shortest length known to reach, and the one to try next: None once the search is over.

    tried: rising, the last known to reach. A longer schedule is taken to end lower, so that
    whatever lies below a length that missed misses too.
    """
    missed, hit = -1, len(tried) - 1
    while hit - missed > 1:
        middle = (missed + hit) // 2
        if tried[middle] not in reached:
            return tried[hit], tried[middle]
        if reached[tried[middle]]:
            hit = middle
        else:
            missed = middle
    return tried[hit], None


def finals(standing: Standing, probes: Iterable[Run], seeds: int) -> dict[int, float]:
    """Length → mean final loss at the optimizer's learning rate, where all seeds have one.

    Infinite where one diverged; a failed run, which will be tried again, leaves it open.
    """
    mine = [r for r in probes if (r.optimizer, r.lr) == (standing.optimizer, standing.best_lr)]
    by_length: dict[int, list[Run]] = {}
    for run in mine:
        if run.schedule is not None and run.status != "failed":
            by_length.setdefault(run.schedule, []).append(run)
    return {n: mean_final(runs) for n, runs in sorted(by_length.items()) if len(runs) == seeds}


def next_lengths(
    standings: Sequence[Standing], probes: Iterable[Run], steps: int, seeds: int
) -> dict[str, int]:
    """Optimizer → length to train next; empty once all searches are over."""
    searches = _searches(standings, list(probes), steps, seeds)
    return {name: following for name, (_, following) in searches.items() if following is not None}


def with_shortest(
    standings: Sequence[Standing], probes: Iterable[Run], steps: int, seeds: int
) -> tuple[Standing, ...]:
    """The standings, with the shortest schedules of the searches that are over."""
    probes = list(probes)
    searches = _searches(standings, probes, steps, seeds)
    whole = sum(steps * s.step_seconds for s in standings if s.optimizer == YARDSTICK)
    found = {name: length for name, (length, following) in searches.items() if following is None}
    return tuple(
        replace(s, shortest=_shortest(s, found[s.optimizer], probes, steps, seeds, whole))
        if s.optimizer in found
        else s
        for s in standings
    )


def _searches(
    standings: Sequence[Standing], probes: Sequence[Run], steps: int, seeds: int
) -> dict[str, tuple[int, int | None]]:
    """Where each search stands, of those that reach AdamW's loss on the race's own schedule."""
    goal = next((s.final for s in standings if s.optimizer == YARDSTICK), math.inf)
    if not math.isfinite(goal):
        return {}
    return {
        s.optimizer: bisect(
            lengths(steps), {n: final <= goal for n, final in finals(s, probes, seeds).items()}
        )
        for s in standings
        if s.optimizer != YARDSTICK and s.final <= goal
    }


def _shortest(
    standing: Standing, length: int, probes: Sequence[Run], steps: int, seeds: int, whole: float
) -> Shortest:
    # a step costs the same on every schedule, and only in the race itself optimizers took turns:
    # its times, not those of the probes, can be compared
    seconds = length * standing.step_seconds
    return Shortest(
        length,
        length / steps,
        seconds,
        seconds / whole if whole else None,
        finals(standing, probes, seeds).get(length, standing.final),
    )
