"""A race from its plan to its result: round after round, what is missing is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from isokron.race.plan import Plan, Rates, make_plan, settings
from isokron.race.report import write_reports
from isokron.race.results import Result, Run
from isokron.race.rounds import Job, Key, has_failed, key_of, probe_rounds, sweep_rounds
from isokron.race.shortest import with_shortest
from isokron.race.standings import summarize
from isokron.race.store import Store, locked, open_store
from isokron.tasks import Task


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a race; `result` is what was finished."""

    def __init__(self, result: Result) -> None:
        super().__init__("race interrupted")
        self.result = result


class Watcher(Protocol):
    """Told what happens, as it happens. why: these runs come on top of those planned before."""

    def planned(self, runs: int, steps: int, why: str = "") -> None: ...
    def started(self, optimizer: str, lr: float, seed: int, steps: int) -> None: ...
    def stepped(self, step: int, loss: float) -> None: ...
    def ended(self, run: Run) -> None: ...


class Silent:
    """A watcher that says nothing."""

    def planned(self, runs: int, steps: int, why: str = "") -> None: ...
    def started(self, optimizer: str, lr: float, seed: int, steps: int) -> None: ...
    def stepped(self, step: int, loss: float) -> None: ...
    def ended(self, run: Run) -> None: ...


def run(
    task: Task | str,
    optimizers: Iterable[str] = ("adamw", "muon"),
    *,
    steps: int = 300,
    seeds: int = 2,
    lrs: Rates = None,
    shortest: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watcher | None = None,
) -> Result:
    """Race optimizers on a task; `adamw` always takes part.

    lrs: learning rates for all, or optimizer → learning rates ("*" for the others). Without,
    each optimizer has its own sweep, which grows while its best value lies at an edge.
    shortest: for those that reach AdamW's final loss, also find the shortest schedule that does.
    out: folder for the files and the page; None writes nothing.
    """
    plan = make_plan(task, optimizers, steps, seeds, lrs, shortest)
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
    done = {key_of(run): run for run in old}
    sweeps = {spec: list(lrs) for spec, lrs in plan.sweeps.items()}
    shorter = probe_rounds(plan, sweeps, done) if plan.shortest else ()
    try:
        for jobs, why in chain(sweep_rounds(plan, sweeps, done), shorter):
            missing = [job for job in jobs if job.key not in done]
            for steps in dict.fromkeys(job.steps for job in jobs):
                watch.planned(sum(job.steps == steps for job in missing), steps, why)
            for job in missing:
                if has_failed(job.entrant.spec, done):
                    continue
                # kept before it is written: Ctrl-C in between must not hide what is on disk
                run = done[job.key] = _train(plan, job, watch)
                if store is not None:
                    store.write_run(run)
                watch.ended(run)
    except KeyboardInterrupt:
        raise Interrupted(_conclude(plan, found, sweeps, done, store, complete=False)) from None
    return _conclude(plan, found, sweeps, done, store, complete=True)


def _train(plan: Plan, job: Job, watch: Watcher) -> Run:
    from isokron.race.train import train

    watch.started(job.entrant.spec, job.lr, job.seed, job.steps)
    run = train(plan.task, job.entrant, job.lr, job.seed, job.steps, watch.stepped)
    return replace(run, schedule=job.schedule)


def _conclude(
    plan: Plan,
    found: Mapping[str, Any],
    sweeps: Mapping[str, Sequence[float]],
    done: Mapping[Key, Run],
    store: Store | None,
    complete: bool,
) -> Result:
    runs = tuple(run for run in done.values() if run.schedule is None)
    probes = tuple(run for run in done.values() if run.schedule is not None)
    standings = summarize(runs, sweeps, plan.seeds)
    searched = plan.shortest or bool(probes)  # what was found once is shown, asked for or not
    if searched:
        standings = with_shortest(standings, probes, plan.steps, plan.seeds)
    result = Result(found, runs, standings, complete, probes, searched)
    if store is not None:
        write_reports(result, store)
    return result
