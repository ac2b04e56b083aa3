"""Optimizers in long runs, everybody with the same tuning, AdamW with two learning rates first.

    python benchmarks/tuned_races.py [--task NAME,NAME]     train what is missing, print tables

One thread. All that is known of a task is in docs/benchmarks/tuned_races/TASK.json, written after
every run: stopped at any time, it goes on where it was; tasks may run side by side.

Two learning rates: that of hidden matrices, and a multiple of it for embeddings, head, norms and
biases. Each optimizer starts at a quarter of the length with three rates a factor of 2 apart, each
with multiples of 1, 3 and 10; a rate at the edge of what was tried is followed by the next. AdamW's
best three pairs also get every other choice of weight decay and beta2. The best four settings train
at full length, then the best with rates a factor of √2 above and below, until a better one is not
found. The best gets two more seeds. "adamw, one rate" is the same search with a multiple of 1.
Settings are chosen on seed 0.

At last the shortest schedule: the best setting is trained on fewer steps, by bisection to a
twentieth, until it ends just at the mean loss of AdamW (seed 0).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import packaged_data
import torch
from records import Records

from isokron.optimizers_by_name import resolve
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
CENTRE = 1e-2  # rates are this times a power of √2
RATIOS = (1, 3, 10)  # of the rate of everything else to that of hidden matrices
DECAYS_AND_BETAS = tuple(
    product((0.1, 0.01), (0.95, 0.99, 0.999))
)  # of AdamW; first is tried first
PAIRS = 3  # of rates, with which AdamW gets all of these
FINALISTS = 4
SEEDS = 3
PARTS = 20  # shortest schedules are found to a twentieth of the length
LEAST = 4  # so many twentieths are taken not to suffice


class Setting(NamedTuple):
    """What a run depends on beside its task, seed and steps."""

    name: str
    lr: float  # of hidden matrices
    ratio: int = 1
    decay: float = 0.1
    beta2: float | None = None  # None: the optimizer's own

    @property
    def spec(self) -> str:
        options = [f"weight_decay={self.decay:g}"] if self.name == ADAMW else []
        if self.beta2 is not None:
            options.append(f"betas=(0.9,{self.beta2:g})")
        if self.ratio > 1:
            options.append(f"lr_scale={{'matrices':1.0,'*':{self.ratio:.1f}}}")
        return f"{self.name}({','.join(options)})" if options else self.name

    def moved(self, half_octaves: int) -> Setting:
        """The same with the rate times a power of √2."""
        place = round(2 * math.log2(self.lr / CENTRE)) + half_octaves
        return self._replace(lr=float(f"{CENTRE * 2 ** (place / 2):.3g}"))


def first_settings(optimizer: str) -> list[Setting]:
    """Three rates with each ratio."""
    is_adamw = optimizer in (ADAMW, ONE_RATE)
    middle = CENTRE / 2 if is_adamw else CENTRE
    name, beta2 = (ADAMW, DECAYS_AND_BETAS[0][1]) if is_adamw else (optimizer, None)
    return [
        Setting(name, middle, ratio, beta2=beta2).moved(half_octaves)
        for ratio in ((1,) if optimizer == ONE_RATE else RATIOS)
        for half_octaves in (-2, 0, 2)
    ]


class Study:
    """The runs of one task, on disk."""

    def __init__(self, task: str) -> None:
        self.name, self.records = task, Records(f"tuned_races/{task}")
        self.steps = STEPS[task]
        # by optimizer, the settings that were tried at a quarter of the length, and at all of it
        self.tried: dict[str, tuple[list[Setting], list[Setting]]] = {}

    def task(self) -> Task:
        make = packaged_data.TASKS.get(self.name)
        return load(self.name) if make is None else make(self.name)

    def runs(self, setting: Setting, steps: int) -> list[dict[str, Any]]:
        """The runs with a setting and this number of steps, by seed."""
        chosen = self.records.select(**setting._asdict(), steps=steps)
        return sorted(chosen, key=lambda run: run["seed"])

    def loss(self, setting: Setting, steps: int, seeds: int = SEEDS) -> float:
        """The mean final loss over the first seeds; infinite where a run diverged or is missing."""
        finals = [run["final"] for run in self.runs(setting, steps)[:seeds]]
        bad = not finals or None in finals
        return math.inf if bad else statistics.fmean(finals)

    def ranked(self, settings: list[Setting], steps: int) -> list[Setting]:
        """By the loss of seed 0."""
        finite = [s for s in settings if math.isfinite(self.loss(s, steps, 1))]
        return sorted(finite, key=lambda setting: self.loss(setting, steps, 1))

    def search(self, optimizer: str) -> Iterator[list[tuple[Setting, int, int]]]:
        """Lists of (setting, steps, seed); each depends on the results of those before."""
        short, steps = self.steps // 4, self.steps
        quarter, full = self.tried.setdefault(optimizer, ([], []))
        new = first_settings(optimizer)
        while new:
            quarter += new
            yield [(setting, short, 0) for setting in new]
            new = [s for ratio in RATIOS if (s := self.beyond_edge(quarter, ratio)) is not None]
        if optimizer in (ADAMW, ONE_RATE):
            new = [
                setting._replace(decay=decay, beta2=beta2)
                for setting in self.ranked(quarter, short)[:PAIRS]
                for decay, beta2 in DECAYS_AND_BETAS[1:]
            ]
            quarter += new
            yield [(setting, short, 0) for setting in new]
        new = self.ranked(quarter, short)[:FINALISTS]
        while new:
            full += new
            yield [(setting, steps, 0) for setting in new]
            best = self.ranked(full, steps)[0]
            new = [s for s in (best.moved(-1), best.moved(1)) if s not in full]
        yield [(best, steps, seed) for seed in range(1, SEEDS)]

    def beyond_edge(self, settings: list[Setting], ratio: int) -> Setting | None:
        """The next rate at this ratio, where the best of those tried is the lowest or highest."""
        rates = sorted(s for s in settings if s.ratio == ratio)
        if not (ranked := self.ranked(rates, self.steps // 4)):
            return rates[0].moved(-2) if rates else None
        if ranked[0] == rates[0]:
            return rates[0].moved(-2)
        return rates[-1].moved(2) if ranked[0] == rates[-1] else None

    def chosen(self, optimizer: str) -> Setting | None:
        """The best setting at full length; None before it was searched for."""
        if optimizer not in self.tried:
            for plan in self.search(optimizer):
                if not all(
                    any(run["seed"] == seed for run in self.runs(setting, steps))
                    for setting, steps, seed in plan
                ):
                    break
        return next(iter(self.ranked(self.tried[optimizer][1], self.steps)), None)

    def shorter(self, optimizer: str, goal: float) -> Iterator[list[tuple[Setting, int, int]]]:
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


def run(name: str, optimizers: tuple[str, ...]) -> None:
    study = Study(name)
    task = study.task()

    def train_all(plans: Iterator[list[tuple[Setting, int, int]]]) -> None:
        for plan in plans:
            for setting, steps, seed in plan:
                key = {**setting._asdict(), "steps": steps, "seed": seed}
                study.records.once(partial(train_once, task, setting, steps, seed), **key)

    # the baseline first
    for optimizer in (ONE_RATE, ADAMW, *optimizers):
        train_all(study.search(optimizer))
    for baseline in (ADAMW, ONE_RATE):
        adamw = study.chosen(baseline)
        assert adamw is not None
        for optimizer in optimizers:
            train_all(study.shorter(optimizer, study.loss(adamw, study.steps)))


def train_once(task: Task, setting: Setting, steps: int, seed: int) -> dict[str, Any]:
    start = time.process_time()
    result = train(
        task,
        resolve(setting.spec),
        setting.lr,
        seed,
        steps,
        # figures show the longest runs; of others only the last evaluation counts
        evaluations=EVALUATIONS if steps == STEPS[task.name] else 5,
    )
    if result.status == "failed":
        raise SystemExit(f"{task.name}, {setting.spec}: {result.message}")
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
