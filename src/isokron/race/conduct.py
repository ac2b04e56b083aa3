"""The order of the runs: interleaved, so that a slow minute of the machine hits all alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from isokron.race.optimizers import Entrant
from isokron.race.plan import Plan, Rates, make_plan, settings
from isokron.race.report import write_reports
from isokron.race.results import Result, Run, best_lr, summarize, sweep
from isokron.race.store import Store, locked, open_store
from isokron.tasks import Task

EXTENSIONS = 2
FACTOR = 3.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a race; `result` is what was finished."""

    def __init__(self, result: Result) -> None:
        super().__init__("race interrupted")
        self.result = result


class Watcher(Protocol):
    """Told what happens, as it happens."""

    def planned(self, runs: int, steps: int) -> None: ...
    def started(self, optimizer: str, lr: float, seed: int) -> None: ...
    def stepped(self, step: int, loss: float) -> None: ...
    def ended(self, run: Run) -> None: ...


class Silent:
    """A watcher that says nothing."""

    def planned(self, runs: int, steps: int) -> None: ...
    def started(self, optimizer: str, lr: float, seed: int) -> None: ...
    def stepped(self, step: int, loss: float) -> None: ...
    def ended(self, run: Run) -> None: ...


def run(
    task: Task | str,
    optimizers: Iterable[str] = ("adamw", "muon"),
    *,
    steps: int = 300,
    seeds: int = 2,
    lrs: Rates = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watcher | None = None,
) -> Result:
    """Race optimizers on a task; `adamw` always takes part.

    lrs: learning rates for all, or optimizer → learning rates ("*" for the others). Without,
    each optimizer has its own sweep, which grows while its best value lies at an edge.
    out: folder for the files and the page; None writes nothing.
    """
    plan = make_plan(task, optimizers, steps, seeds, lrs)
    found = settings(plan)
    if out is None:
        return execute(plan, found, None, watch or Silent())
    store = open_store(Path(out), found, resume)
    with locked(store.folder):
        return execute(plan, found, store, watch or Silent())


def execute(plan: Plan, found: Mapping[str, Any], store: Store | None, watch: Watcher) -> Result:
    """Run what is missing, write what was found; on Ctrl-C too, which is then raised again."""
    if store is not None:
        store.begin(found)
    # a failed run is tried again: what made the optimizer fail may have been repaired
    old = [r for r in store.read_runs() if r.status != "failed"] if store is not None else []
    done = {(run.optimizer, run.lr, run.seed): run for run in old}
    sweeps = {spec: list(lrs) for spec, lrs in plan.sweeps.items()}
    complete = False
    try:
        for new in _rounds(plan, sweeps, done):
            watch.planned(_missing(new, plan, done), plan.steps)
            for entrant, lr, seed in order(plan.entrants, new, plan.seeds):
                if (entrant.spec, lr, seed) in done or _failed(entrant.spec, done):
                    continue
                done[entrant.spec, lr, seed] = _train(plan, entrant, lr, seed, store, watch)
        complete = True
    except KeyboardInterrupt:
        raise Interrupted(_conclude(plan, found, sweeps, done, store, complete=False)) from None
    return _conclude(plan, found, sweeps, done, store, complete)


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


def _rounds(
    plan: Plan, sweeps: dict[str, list[float]], done: Mapping[Any, Run]
) -> Iterator[dict[str, list[float]]]:
    """The sweeps as planned, then what they are extended by; `sweeps` grows along."""
    yield {spec: list(lrs) for spec, lrs in sweeps.items()}
    for _ in range(EXTENSIONS):
        new = {}
        for spec in plan.growing:
            finals = sweep([run for run in done.values() if run.optimizer == spec])
            lr = next_lr({lr: finals.get(lr, math.inf) for lr in sweeps[spec]})
            if lr is not None and not _failed(spec, done):
                new[spec] = [lr]
                sweeps[spec].append(lr)
        if not new:
            return
        yield new


def _missing(new: Mapping[str, Sequence[float]], plan: Plan, done: Mapping[Any, Run]) -> int:
    return sum(
        (e.spec, lr, seed) not in done for e, lr, seed in order(plan.entrants, new, plan.seeds)
    )


def _failed(spec: str, done: Mapping[Any, Run]) -> bool:
    return any(run.status == "failed" for run in done.values() if run.optimizer == spec)


def _train(
    plan: Plan, entrant: Entrant, lr: float, seed: int, store: Store | None, watch: Watcher
) -> Run:
    from isokron.race.train import train

    watch.started(entrant.spec, lr, seed)
    run = train(plan.task, entrant, lr, seed, plan.steps, watch.stepped)
    if store is not None:
        store.write_run(run)
    watch.ended(run)
    return run


def _conclude(
    plan: Plan,
    found: Mapping[str, Any],
    sweeps: Mapping[str, Sequence[float]],
    done: Mapping[Any, Run],
    store: Store | None,
    complete: bool,
) -> Result:
    runs = tuple(done.values())
    result = Result(found, runs, summarize(runs, sweeps, plan.seeds), complete)
    if store is not None:
        write_reports(result, store)
    return result
