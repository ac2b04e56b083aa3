"""Optimizers in long runs, everybody with the same tuning, AdamW with two learning rates first.

    python benchmarks/tuned_races.py run [--task NAME,NAME]    train what is missing
    python benchmarks/tuned_races.py time [--task NAME,NAME]   time a step, optimizers in turn
    python benchmarks/tuned_races.py table                     print tables, draw figures

One thread. All that is known of a task is in docs/benchmarks/tuned_races/TASK.json, written after
every run: stopped at any time, `run` goes on where it was; tasks may run side by side.

Two learning rates: that of hidden matrices, and a multiple of it for embeddings, head, norms and
biases. Settings are chosen by the search of `isokron race` (isokron/race/search.py), on seed 0.
"adamw, one rate" is the same search with a multiple of 1. The best gets two more seeds.

Then the shortest schedule: the best setting is trained on fewer steps, by bisection to a twentieth,
until it ends just at the mean loss of AdamW (seed 0). The time of a schedule is its steps times the
CPU time of a step, from `time`.

At last `match_adamw=True`: each optimizer with AdamW's one rate, a third and three times of it, and
the rate of AdamW's matrices where it has two (seed 0).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import packaged_data
import torch
from records import FOLDER, Records
from timing import conditions

from isokron.files import write_atomically
from isokron.optim.lr_transfer import METHOD_MULTIPLE, REST_MULTIPLE
from isokron.optimizers_by_name import resolve
from isokron.race.search import Plans, Search, Setting, search_for
from isokron.race.train import EVALUATIONS, train
from isokron.report.charts import Line, Plot, standalone
from isokron.tasks import Task, load
from isokron.training import batch_order, make_model

STEPS = {
    "speeches-tiny": 2400,
    "cifar10": 2400,
    "speeches-small": 960,
    "enwik8-1m": 960,
    "llama-bpe": 960,
    "enwik8-5m": 800,
}
ADAMW, ONE_RATE = "adamw", "adamw, one rate"
OPTIMIZERS = ("shampoo", "katie", "soap", "muon")
DECAY = 0.1  # in records, also of optimizers that leave weight decay alone
SEEDS = 3
PARTS = 20  # shortest schedules are found to a twentieth of the length
LEAST = 4  # so many twentieths are taken not to suffice
TRIPLE = 3  # `match_adamw` is tried at AdamW's rate, and this many times lower and higher
SETTLED = 4  # evaluations of 25 that a figure leaves above its frame
DOCS = FOLDER.parent


def key_of(setting: Setting) -> dict[str, Any]:
    """A setting as records have it."""
    return {**asdict(setting), "decay": DECAY if setting.decay is None else setting.decay}


class Study:
    """The runs of one task, on disk."""

    def __init__(self, task: str) -> None:
        self.name, self.records = task, Records(f"tuned_races/{task}")
        self.steps = STEPS[task]
        self.times: dict[str, Any] = self.records.facts.setdefault("times", {})
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

    def time_ratio(self, optimizer: str) -> float:
        """The time of a whole step, as a multiple of that with AdamW."""
        return sum(self.times[optimizer].values()) / sum(self.times[ADAMW].values())

    def rates(self) -> list[float]:
        """AdamW's one rate, lower and higher ones, and that of its matrices where it has two."""
        one, two = self.chosen(ONE_RATE), self.chosen(ADAMW)
        if one is None or two is None:
            return []
        rates = (one.lr, one.lr / TRIPLE, one.lr * TRIPLE, two.lr)
        return list(dict.fromkeys(float(f"{lr:.3g}") for lr in rates))

    def matched(self, optimizer: str, lr: float) -> Setting:
        """What `match_adamw=True` makes of a rate; AdamW's own setting with that one rate."""
        if optimizer == ADAMW:
            one = self.chosen(ONE_RATE)
            assert one is not None
            return replace(one, lr=lr)
        rate = float(f"{METHOD_MULTIPLE * lr:.3g}")
        return Setting(optimizer, rate, REST_MULTIPLE / METHOD_MULTIPLE)


def plans(study: Study, optimizers: tuple[str, ...]) -> Plans:
    """Everything to be trained, in this order."""
    # the baseline first
    for optimizer in (ONE_RATE, ADAMW, *optimizers):
        yield from study.search(optimizer)
    for baseline in (ONE_RATE, ADAMW):
        adamw = study.chosen(baseline)
        assert adamw is not None
        for optimizer in (ADAMW, *optimizers) if baseline == ONE_RATE else optimizers:
            yield from study.shorter(optimizer, study.loss(adamw, study.steps))
    for optimizer in (ADAMW, *optimizers):
        yield [(study.matched(optimizer, lr), study.steps, 0) for lr in study.rates()]


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


def time_steps(name: str, optimizers: tuple[str, ...], rounds: int = 3, steps: int = 40) -> None:
    """CPU seconds of a step, model and optimizer; optimizers take turns, the median of rounds.

    40 steps after the first 10 hold four refreshes of a method that refreshes every 10 steps.
    """
    study = Study(name)
    task = study.task()
    order = batch_order(len(task.train), task.batch_size, 10 + steps, 0)
    seconds: dict[str, list[tuple[float, float]]] = {}
    for optimizer_name in (ADAMW, *optimizers) * rounds:
        model = make_model(task, 0).train()
        optimizer = resolve(optimizer_name).build(model, 1e-3)
        model_seconds, optimizer_seconds = [], []
        for indices in order:
            optimizer.zero_grad()
            start = time.process_time()
            task.losses(model, task.train.batch(indices)).mean().backward()
            between = time.process_time()
            optimizer.step()
            model_seconds.append(between - start)
            optimizer_seconds.append(time.process_time() - between)
        means = (statistics.median(model_seconds[10:]), statistics.fmean(optimizer_seconds[10:]))
        seconds.setdefault(optimizer_name, []).append(means)
    # the model is the same for all
    model_time = statistics.median(pair[0] for pairs in seconds.values() for pair in pairs)
    for optimizer_name, pairs in seconds.items():
        optimizer_time = statistics.median(pair[1] for pair in pairs)
        study.times[optimizer_name] = {"model": model_time, "optimizer": optimizer_time}
        print(f"{name} {optimizer_name}: {1e3 * model_time:.1f} + {1e3 * optimizer_time:.1f} ms")
    study.records.facts["timed"] = conditions()
    study.records.save()


def table(name: str, optimizers: tuple[str, ...]) -> list[str]:
    """Lines of a table: the best setting, its loss, the shortest schedules, time and state."""
    study = Study(name)
    columns = (
        "loss | rate of matrices | of the rest | shortest | its time | against one rate | state"
    )
    rows = ["", f"| {name} | {columns} |", "|---" * 8 + "|"]
    adamw_bytes = study.records.select(name=ADAMW)[0]["bytes"]
    for optimizer in (ONE_RATE, ADAMW, *optimizers):
        if (setting := study.chosen(optimizer)) is None:
            continue
        finals = [run["final"] / unit_of(name) for run in study.runs(setting, study.steps)]
        spread = f" ± {statistics.stdev(finals):.3f}" if len(finals) > 1 else " (one seed)"
        cells = [f"{statistics.fmean(finals):.3f}{spread}", f"{setting.lr:g}", f"× {setting.ratio}"]
        if setting.name == ADAMW:
            cells[1] += f", β₂ {setting.beta2}, decay {setting.decay}"
        share = study.shortest(optimizer) if optimizer not in (ONE_RATE, ADAMW) else None
        cells.append("" if share is None else f"{share:.2f}")
        timed = share is not None and {ADAMW, optimizer} <= study.times.keys()
        cells.append(f"{share * study.time_ratio(optimizer):.2f}" if timed and share else "")
        against = study.shortest(optimizer, ONE_RATE) if optimizer != ONE_RATE else None
        cells.append("" if against is None else f"{against:.2f}")
        cells.append(f"{study.runs(setting, study.steps)[0]['bytes'] / adamw_bytes:.1f}")
        rows.append(f"| {optimizer} | {' | '.join(cells)} |")
    return rows


def matched_table(name: str, optimizers: tuple[str, ...]) -> list[str]:
    """Lines of a table: losses with `match_adamw=True` by AdamW's rate, and the best ones."""
    study = Study(name)
    names = (ADAMW, *optimizers)
    rows = ["", f"| {name} | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    losses = {
        f"from {lr:g}": [study.final(study.matched(each, lr), study.steps, 0) for each in names]
        for lr in study.rates()
    }
    best = [study.chosen(each) for each in names]
    losses["best"] = [math.inf if s is None else study.final(s, study.steps, 0) for s in best]
    for title, values in losses.items():
        cells = (f"{v / unit_of(name):.3f}" if math.isfinite(v) else "" for v in values)
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return rows


def tables() -> list[str]:
    """The rows of all tables."""
    names = [name for name in STEPS if Study(name).records.runs]
    return [row for name in names for f in (table, matched_table) for row in f(name, OPTIMIZERS)]


def unit_of(name: str) -> float:
    """Nats in the unit of a task's losses: bits on enwik8."""
    return math.log(2) if name.startswith("enwik8") else 1.0


def figure(name: str, optimizers: tuple[str, ...], by: str) -> Plot | None:
    """Evaluation loss at the best settings, by "step" or by "time" of training."""
    study = Study(name)
    lines = []
    for colour, optimizer in enumerate((ADAMW, *optimizers, ONE_RATE)):
        setting, seconds = study.chosen(optimizer), study.times.get(optimizer.partition(",")[0])
        if setting is None or (by == "time" and seconds is None):
            continue
        run = study.runs(setting, study.steps)[0]
        width = 1.0 if seconds is None or by == "step" else sum(seconds.values())
        curve = zip(run["eval_steps"], run["eval_losses"], strict=True)
        points = [(x * width, y / unit_of(name)) for x, y in curve]
        lines.append(Line(optimizer, colour, points))
    if not lines:
        return None
    losses = [loss for line in lines for _, loss in line.points[SETTLED:]]
    low, high = min(losses), max(losses)
    margin = 0.06 * (high - low)
    return Plot(
        f"{name}-by-{by}",
        f"{name}: evaluation loss, {study.steps:,} steps",
        "Each optimizer at its best setting, seed 0.",
        "step" if by == "step" else "CPU seconds of training, one thread",
        f"{name}: {'bits per byte' if unit_of(name) < 1 else study.task().unit}",
        lines,
        y_range=(low - margin, high + margin),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "time", "table"))
    parser.add_argument("--task", default=",".join(STEPS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks, optimizers = args.task.split(","), tuple(args.optimizers.split(","))
    if unknown := set(tasks) - set(STEPS):
        parser.error(f"--task must be of {', '.join(STEPS)}, got {', '.join(sorted(unknown))}")
    for name in tasks:
        if args.command == "run":
            run(name, optimizers)
        elif args.command == "time":
            time_steps(name, optimizers)
        elif Study(name).records.runs:
            print("\n".join(table(name, optimizers) + matched_table(name, optimizers)))
            for by in ("step", "time"):
                if (plot := figure(name, optimizers, by)) is not None:
                    path = DOCS / f"tuned_races-{plot.name}.svg"
                    write_atomically(path, [standalone(plot).encode()])


if __name__ == "__main__":
    main()
