"""What a race found, as values: runs as measured, standings, the whole result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """One training run.

    status: "finished", "diverged" (loss not finite or far above the start) or "failed".
    eval_steps, eval_losses: the evaluation curve, from step 0 as far as the run went.
    model_seconds, optimizer_seconds: per step, the median of forward and backward, and the mean of
    the optimizer's part, some of whose steps may cost more than others.
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
    def final(self) -> float:
        """Evaluation loss after the last step; infinite if the run did not get there."""
        return self.eval_losses[-1] if self.status == "finished" else math.inf

    @property
    def step_seconds(self) -> float:
        return self.model_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class Shortest:
    """The shortest schedule tried with which an optimizer ends at or below AdamW's final loss.

    share, time_share: of AdamW's steps and seconds for the whole race. final: mean over seeds.
    """

    steps: int
    share: float
    seconds: float
    time_share: float | None
    final: float


@dataclass(frozen=True)
class Standing:
    """One optimizer's part in the race, at its best learning rate.

    final, spread: mean and standard deviation over seeds of the final evaluation loss.
    steps_to_reach, seconds_to_reach: where the mean curve first meets AdamW's final loss.
    fewer_steps, less_time: AdamW's own steps and seconds to that loss, divided by these.
    edge: the best learning rate is the lowest or highest tried, so it may not be the best.
    shortest: None for AdamW, and where not looked for, not found yet or out of reach.
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
    """A race: its settings, all runs, and one standing per optimizer in the order given.

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
