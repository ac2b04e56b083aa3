"""What is trained, in which order: optimizers take turns, so that a slow minute hits all alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from isokron.race.optimizers import Entrant
from isokron.race.plan import Plan
from isokron.race.results import Run
from isokron.race.shortest import next_lengths
from isokron.race.standings import best_lr, summarize, sweep

EXTENSIONS = 2
FACTOR = 3.0

Key: TypeAlias = tuple[str, float, int, int | None]  # optimizer, learning rate, seed, schedule


@dataclass(frozen=True)
class Job:
    """A run to be trained. schedule: as in Run, None for the race's own; steps: its length."""

    entrant: Entrant
    lr: float
    seed: int
    steps: int
    schedule: int | None = None

    @property
    def key(self) -> Key:
        return self.entrant.spec, self.lr, self.seed, self.schedule


Round: TypeAlias = tuple[list[Job], str]  # and why it comes on top of those before


def key_of(run: Run) -> Key:
    return run.optimizer, run.lr, run.seed, run.schedule


def has_failed(spec: str, done: Mapping[Key, Run]) -> bool:
    return any(run.status == "failed" for run in done.values() if run.optimizer == spec)


def order(
    entrants: Sequence[Entrant], sweeps: Mapping[str, Sequence[float]], seeds: int
) -> Iterator[tuple[Entrant, float, int]]:
    """By seed, then by position in the sweep, then by optimizer."""
    for seed in range(seeds):
        for i in range(max((len(lrs) for lrs in sweeps.values()), default=0)):
            for entrant in entrants:
                lrs = sweeps.get(entrant.spec, ())
                if i < len(lrs):
                    yield entrant, lrs[i], seed


def next_lr(finals: Mapping[float, float]) -> float | None:
    """The learning rate to try next: beyond the edge at which the best lies, if it lies there.

    finals: learning rate → mean final loss, infinite where it diverged.
    """
    best = best_lr(finals)
    if best is None or best == min(finals):
        lr = min(finals) / FACTOR  # also if all diverged
    elif best == max(finals):
        lr = max(finals) * FACTOR
    else:
        return None
    return float(f"{lr:.3g}")


def sweep_rounds(
    plan: Plan, sweeps: dict[str, list[float]], done: Mapping[Key, Run]
) -> Iterator[Round]:
    """The sweeps as planned, then what they are extended by; `sweeps` grows along."""
    yield _jobs(plan, sweeps), ""
    for _ in range(EXTENSIONS):
        new = {}
        for spec in plan.growing:
            finals = sweep([run for run in _of_the_race(done) if run.optimizer == spec])
            lr = next_lr({lr: finals.get(lr, math.inf) for lr in sweeps[spec]})
            if lr is not None and not has_failed(spec, done):
                new[spec] = [lr]
                sweeps[spec].append(lr)
        if not new:
            return
        yield _jobs(plan, new), "the best learning rate lies at an edge of the sweep"


def probe_rounds(
    plan: Plan, sweeps: Mapping[str, Sequence[float]], done: Mapping[Key, Run]
) -> Iterator[Round]:
    """After the race: every optimizer on the length its search tries next, till all are over."""
    standings = summarize(_of_the_race(done), sweeps, plan.seeds)
    rates = {s.optimizer: [s.best_lr] for s in standings if s.best_lr is not None}
    while True:
        new = next_lengths(standings, done.values(), plan.steps, plan.seeds)
        new = {spec: length for spec, length in new.items() if not has_failed(spec, done)}
        if not new:
            return
        chosen = order(plan.entrants, {spec: rates[spec] for spec in new}, plan.seeds)
        jobs = [Job(e, lr, seed, new[e.spec], new[e.spec]) for e, lr, seed in chosen]
        yield jobs, "looking for the shortest schedule"


def _of_the_race(done: Mapping[Key, Run]) -> list[Run]:
    return [run for run in done.values() if run.schedule is None]


def _jobs(plan: Plan, sweeps: Mapping[str, Sequence[float]]) -> list[Job]:
    chosen = order(plan.entrants, sweeps, plan.seeds)
    return [Job(entrant, lr, seed, plan.steps) for entrant, lr, seed in chosen]
