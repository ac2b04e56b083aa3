"""Optimizers in long runs, everybody with the same tuning, AdamW with two learning rates first.

    python benchmarks/tuned_races.py [--task NAME,NAME]     train what is missing, print tables

One thread. All that is known of a task is in docs/benchmarks/tuned_races/TASK.json, written after
every run: stopped at any time, it goes on where it was; tasks may run side by side.

Two learning rates: that of hidden matrices, and a multiple of it for embeddings, head, norms and
biases. Settings are chosen by the search of `isokron race` (isokron/race/search.py), on seed 0.
"adamw, one rate" is the same search with a multiple of 1. The best gets two more seeds.

At last the shortest schedule: the best setting is trained on fewer steps, by bisection to a
twentieth, until it ends just at the mean loss of AdamW (seed 0).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import packaged_data
import torch
from records import Records

from isokron.optimizers_by_name import resolve
from isokron.race.search import Plans, Search, Setting, search_for
from isokron.race.train import EVALUATIONS, train
from isokron.tasks import Task, load

STEPS = {
    "speeches-tiny": 2400,
    "cifar10": 2400,
    "speeches-small": 1920,
    "enwik8-1m": 1920,
    "llama-bpe": 1600,
    "enwik8-5m": 1600,
}
ADAMW, ONE_RATE = "adamw", "adamw, one rate"
OPTIMIZERS = ("shampoo", "katie", "soap", "muon")
DECAY = 0.1  # in records, also of optimizers that leave weight decay alone
SEEDS = 3
PARTS = 20  # shortest schedules are found to a twentieth of the length
LEAST = 4  # so many twentieths are taken not to suffice


def key_of(setting: Setting) -> dict[str, Any]:
    """A setting as records have it."""
    return {**asdict(setting), "decay": DECAY if setting.decay is None else setting.decay}


class Study:
    """The runs of one task, on disk."""

    def __init__(self, task: str) -> None:
        self.name, self.records = task, Records(f"tuned_races/{task}")
        self.steps = STEPS[task]
        # by optimizer, what its search has asked for so far
        self.searches: dict[str, Search] = {}

    def task(self) -> Task:
        make = packaged_data.TASKS.get(self.name)
        return load(self.name) if make is None else make(self.name)

    def runs(self, setting: Setting, steps: int) -> list[dict[str, Any]]:
        """The runs with a setting and this number of steps, by seed."""
        chosen = self.records.select(**key_of(setting), steps=steps)
        return sorted(chosen, key=lambda run: run["seed"])

    def final(self, setting: Setting, steps: int, seed: int) -> float:
        """The final loss of a run; infinite if it diverged or is missing."""
        finals = [run["final"] for run in self.runs(setting, steps) if run["seed"] == seed]
        return math.inf if finals in ([], [None]) else finals[0]

    def loss(self, setting: Setting, steps: int) -> float:
        """The mean final loss over the seeds there are; infinite where one diverged."""
        seeds = [run["seed"] for run in self.runs(setting, steps)] or [0]
        return statistics.fmean(self.final(setting, steps, seed) for seed in seeds)

    def search(self, optimizer: str) -> Plans:
        """Lists of runs; each depends on the results of those before."""
        entrant = resolve(optimizer.partition(",")[0])
        search = search_for(entrant, self.steps, SEEDS, self.final)
        if optimizer == ONE_RATE:
            search.ratios = (1,)
        self.searches[optimizer] = search
        return search.plans()

    def chosen(self, optimizer: str) -> Setting | None:
        """The best setting at full length; None before it was searched for."""
        if optimizer not in self.searches:
            for plan in self.search(optimizer):
                if not all(
                    any(run["seed"] == seed for run in self.runs(setting, steps))
                    for setting, steps, seed in plan
                ):
                    break
        search = self.searches[optimizer]
        ranked = search.ranked(search.full, self.steps)
        return next((s for s in ranked if math.isfinite(self.loss(s, self.steps))), None)

    def shorter(self, optimizer: str, goal: float) -> Plans:
        """Schedules of the best setting, by bisection, while a shorter one may reach the goal."""
        setting = self.chosen(optimizer)
        if setting is None or self.loss(setting, self.steps) > goal:
            return
        while (middle := self.next_part(setting, goal)) is not None:
            yield [(setting, self.part(middle), 0)]

    def part(self, k: int) -> int:
        """The steps of k twentieths of the length."""
        return round(k / PARTS * self.steps)

    def reached(self, setting: Setting, goal: float) -> list[int]:
        """The twentieths with which a setting has ended at the goal or below."""
        parts = range(LEAST + 1, PARTS + 1)
        return [k for k in parts if self.loss(setting, self.part(k)) <= goal]

    def next_part(self, setting: Setting, goal: float) -> int | None:
        """The twentieths to try next; None where neighbours are known."""
        high = min(self.reached(setting, goal))
        below = [k for k in range(LEAST + 1, high) if self.runs(setting, self.part(k))]
        middle = (max(below, default=LEAST) + high) // 2
        return None if middle in (LEAST, *below) else middle

    def shortest(self, optimizer: str, baseline: str = ADAMW) -> float | None:
        """The least share of the steps with which an optimizer ends at AdamW's loss or below."""
        setting, adamw = self.chosen(optimizer), self.chosen(baseline)
        if setting is None or adamw is None:
            return None
        parts = self.reached(setting, self.loss(adamw, self.steps))
        return min(parts) / PARTS if parts else None


def plans(study: Study, optimizers: tuple[str, ...]) -> Plans:
    """Everything to be trained, in this order."""
    # the baseline first
    for optimizer in (ONE_RATE, ADAMW, *optimizers):
        yield from study.search(optimizer)
    for baseline in (ADAMW, ONE_RATE):
        adamw = study.chosen(baseline)
        assert adamw is not None
        for optimizer in optimizers:
            yield from study.shorter(optimizer, study.loss(adamw, study.steps))


def run(name: str, optimizers: tuple[str, ...]) -> None:
    study = Study(name)
    task = study.task()
    for plan in plans(study, optimizers):
        for setting, steps, seed in plan:
            key = {**key_of(setting), "steps": steps, "seed": seed}
            study.records.once(partial(train_once, task, setting, steps, seed), **key)


def train_once(task: Task, setting: Setting, steps: int, seed: int) -> dict[str, Any]:
    start = time.process_time()
    result = train(
        task,
        resolve(setting.name),
        setting,
        seed,
        steps,
        # figures show the longest runs; of others only the last evaluation counts
        evaluations=EVALUATIONS if steps == STEPS[task.name] else 5,
    )
    if result.status == "failed":
        raise SystemExit(f"{task.name}, {setting.name}, {setting}: {result.message}")
    losses = [round(loss, 5) for loss in result.eval_losses]
    return {
        "status": result.status,
        "final": losses[-1] if result.status == "finished" else None,
        "bytes": result.optimizer_bytes,
        "cpu_seconds": round(time.process_time() - start),
        "eval_steps": result.eval_steps,
        "eval_losses": losses,
    }


def table(name: str, optimizers: tuple[str, ...]) -> list[str]:
    """Lines of a table: the best setting, its loss, and the shortest schedules."""
    study = Study(name)
    unit = math.log(2) if name.startswith("enwik8") else 1.0
    head = f"| {name} | loss | rate of matrices | of the rest | shortest | against one rate |"
    rows = ["", head, "|---" * 6 + "|"]
    for optimizer in (ONE_RATE, ADAMW, *optimizers):
        if (setting := study.chosen(optimizer)) is None:
            continue
        finals = [run["final"] / unit for run in study.runs(setting, study.steps)]
        spread = f" ± {statistics.stdev(finals):.3f}" if len(finals) > 1 else " (one seed)"
        cells = [f"{statistics.fmean(finals):.3f}{spread}", f"{setting.lr:g}", f"× {setting.ratio}"]
        for baseline in (ADAMW, ONE_RATE):
            share = None if setting.name == ADAMW else study.shortest(optimizer, baseline)
            cells.append("" if share is None else f"{share:.2f}")
        rows.append(f"| {optimizer} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default=",".join(STEPS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks, optimizers = args.task.split(","), tuple(args.optimizers.split(","))
    if unknown := set(tasks) - set(STEPS):
        parser.error(f"--task must be of {', '.join(STEPS)}, got {', '.join(sorted(unknown))}")
    for name in tasks:
        run(name, optimizers)
        print("\n".join(table(name, optimizers)))


if __name__ == "__main__":
    main()
