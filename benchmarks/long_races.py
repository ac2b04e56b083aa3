"""Does it hold in a long run? Optimizers at 1, 4 and 16 times the steps of a short race.

    python benchmarks/long_races.py run [--task NAME,NAME]     train what is missing
    python benchmarks/long_races.py time [--task NAME,NAME]    time a step, optimizers in turn
    python benchmarks/long_races.py adamw [--task NAME,NAME]   AdamW at 16x without halving
    python benchmarks/long_races.py table                      print tables, draw figures

One thread. All that is known of a task is in docs/benchmarks/long_races/TASK.json, written after
every run: stopped at any time, `run` goes on where it was; tasks may run side by side.

Settings are chosen by successive halving on seed 0. At 1x AdamW has 12 (three learning rates, each
with four choices of weight decay, beta2 and warm-up), every other optimizer five learning rates; at
4x the best 3 of AdamW and the best 2 of the others; at 16x the best 2 and the best 1. Then the
best at 16x have two more seeds: AdamW, and the three others that end lowest. At last the shortest
schedule: who ends at or below AdamW's loss is trained on 0.6 of the steps, then on 0.4 or 0.8, and
so on by bisection to a twentieth of the steps (seed 0). The time of a schedule is its steps times
the CPU time of a step, from `time`.

`adamw` trains UNTUNED, which is not among the settings, at AdamW's best learning rate at 16x (seed
0): halving at short horizons may drop what is best at long ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import packaged_data
import torch
from records import FOLDER, Records
from timing import conditions

from isokron.files import write_atomically
from isokron.optimizers_by_name import resolve
from isokron.race.train import EVALUATIONS, train
from isokron.report.charts import Line, Plot, standalone
from isokron.tasks import Task, load
from isokron.training import batch_order, make_model

SHORT = {  # steps of 1x
    "mnist": 150,
    "cifar10": 150,
    "cifar10n": 150,
    "speeches-tiny": 150,
    "speeches-small": 120,
    "enwik8-1m": 120,
    "enwik8-5m": 100,
}
OPTIMIZERS = (
    "muon",
    "soap",
    "shampoo",
    "katie",
    "quad",
    "natural",
    "heavyball:SOAP",
    "pytorch_optimizer:SOAP",
)
LRS = (2e-3, 5e-3, 1e-2, 2e-2, 4e-2)
ADAMW_LRS = (1e-3, 3e-3, 1e-2)
# (weight decay, beta2, warm-up)
ADAMW = ((0.01, 0.999, 0.1), (0.1, 0.99, 0.1), (0.1, 0.95, 0.1), (0.01, 0.99, 0.02))
UNTUNED = "adamw(weight_decay=0.1,betas=(0.9,0.999))"
SEEDS = 3
REPEATED = 3  # optimizers beside AdamW that get more than one seed
LONG = 16
PARTS = 20  # shortest schedules are found to a twentieth of the longest
LEAST = 4  # so many twentieths are taken not to suffice
SETTLED = 4  # evaluations of 25 that a figure leaves above its frame
DOCS = FOLDER.parent


class Setting(NamedTuple):
    """What a run depends on beside its task, seed and steps."""

    optimizer: str
    spec: str
    lr: float
    warmup: float = 0.1


def settings(optimizer: str) -> list[Setting]:
    if optimizer != "adamw":
        return [Setting(optimizer, optimizer, lr) for lr in LRS]
    return [
        Setting("adamw", f"adamw(weight_decay={decay},betas=(0.9,{beta2}))", lr, warmup)
        for decay, beta2, warmup in ADAMW
        for lr in ADAMW_LRS
    ]


class Study:
    """The runs and step times of one task, on disk."""

    def __init__(self, name: str) -> None:
        self.name, self.records = name, Records(f"long_races/{name}")
        self.times: dict[str, Any] = self.records.facts.setdefault("times", {})

    def task(self) -> Task:
        make = packaged_data.TASKS.get(self.name)
        return load(self.name) if make is None else make(self.name)

    def runs(self, setting: Setting, steps: int) -> list[dict[str, Any]]:
        """The runs with a setting and this number of steps, by seed."""
        chosen = self.records.select(**setting._asdict(), steps=steps)
        return sorted(chosen, key=lambda run: run["seed"])

    def loss(self, setting: Setting, steps: int) -> float:
        """The mean final loss over seeds; infinite where a run diverged or is missing."""
        finals = [run["final"] for run in self.runs(setting, steps)]
        bad = not finals or None in finals
        return math.inf if bad else statistics.fmean(finals)

    def best(self, optimizer: str, horizon: int, count: int) -> list[Setting]:
        """The settings with the lowest loss of seed 0 at a horizon."""
        steps = horizon * SHORT[self.name]

        def first(setting: Setting) -> float:
            runs = self.runs(setting, steps)
            return math.inf if not runs or runs[0]["final"] is None else runs[0]["final"]

        ranked = sorted(settings(optimizer), key=first)
        return [setting for setting in ranked[:count] if math.isfinite(first(setting))]

    def chosen(self, optimizer: str) -> Setting | None:
        """The best setting at 16x."""
        return next(iter(self.best(optimizer, LONG, 1)), None)

    def rounds(
        self, optimizers: tuple[str, ...], seeds: int
    ) -> Iterator[list[tuple[Setting, int, int]]]:
        """Lists of (setting, steps, seed); each depends on the results of those before."""
        short = SHORT[self.name]
        names = ("adamw", *optimizers)
        yield [(setting, short, 0) for name in names for setting in settings(name)]
        for horizon, counts in ((4, (3, 2)), (LONG, (2, 1))):
            yield [
                (setting, horizon * short, 0)
                for name in names
                for setting in self.best(name, horizon // 4, counts[name != "adamw"])
            ]
        steps = LONG * short
        best = {name: setting for name in names if (setting := self.chosen(name)) is not None}
        others = sorted(set(best) - {"adamw"}, key=lambda name: self.loss(best[name], steps))
        repeated = [best[name] for name in ("adamw", *others[:REPEATED]) if name in best]
        yield [(setting, steps, seed) for setting in repeated for seed in range(1, seeds)]
        goal = self.loss(best["adamw"], steps)
        reach = [best[name] for name in others if self.loss(best[name], steps) <= goal]
        for _ in range(math.ceil(math.log2(PARTS))):
            tried = [(setting, self.next_part(setting, goal)) for setting in reach]
            yield [(setting, self.part(k), 0) for setting, k in tried if k is not None]

    def part(self, k: int) -> int:
        """The steps of k twentieths of a run at 16x."""
        return round(k / PARTS * LONG * SHORT[self.name])

    def reached(self, setting: Setting, goal: float) -> list[int]:
        """The twentieths with which a setting has ended at the goal or below."""
        return [k for k in range(1, PARTS + 1) if self.loss(setting, self.part(k)) <= goal]

    def next_part(self, setting: Setting, goal: float) -> int | None:
        """The twentieths to try next, by bisection; None where neighbours are known."""
        high = min(self.reached(setting, goal))
        below = [k for k in range(LEAST + 1, high) if self.runs(setting, self.part(k))]
        middle = (max(below, default=LEAST) + high) // 2
        return None if middle in (LEAST, *below) else middle

    def shortest(self, setting: Setting) -> float | None:
        """The least share of the 16x steps with which a setting ends at AdamW's loss or below."""
        steps, adamw = LONG * SHORT[self.name], self.chosen("adamw")
        if adamw is None:
            return None
        parts = self.reached(setting, self.loss(adamw, steps))
        return min(parts) / PARTS if parts else None


def run(name: str, optimizers: tuple[str, ...], seeds: int = SEEDS) -> None:
    study = Study(name)
    task = study.task()
    for plan in study.rounds(optimizers, seeds):
        for setting, steps, seed in plan:
            key = {**setting._asdict(), "steps": steps, "seed": seed}
            study.records.once(partial(train_once, task, setting, steps, seed), **key)


def run_untuned(name: str) -> None:
    study = Study(name)
    chosen, task = study.chosen("adamw"), study.task()
    assert chosen is not None
    setting = Setting("untuned adamw", UNTUNED, chosen.lr)
    steps = LONG * SHORT[name]
    compute = partial(train_once, task, setting, steps, 0)
    study.records.once(compute, **setting._asdict(), steps=steps, seed=0)


def train_once(task: Task, setting: Setting, steps: int, seed: int) -> dict[str, Any]:
    start = time.process_time()
    long = steps == LONG * SHORT[task.name]
    result = train(
        task,
        resolve(setting.spec),
        setting.lr,
        seed,
        steps,
        warmup=setting.warmup,
        # figures show the longest runs; of others only the last evaluation counts
        evaluations=EVALUATIONS if long else 5,
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


def time_steps(name: str, optimizers: tuple[str, ...], rounds: int = 3, steps: int = 40) -> None:
    """CPU seconds of a step, model and optimizer; optimizers take turns, the median of rounds.

    40 steps after the first 10 hold four refreshes of a method that refreshes every 10 steps.
    """
    study = Study(name)
    task = study.task()
    order = batch_order(len(task.train), task.batch_size, 10 + steps, 0)
    seconds: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds * (1 + len(optimizers))):
        optimizer_name = ("adamw", *optimizers)[turn % (1 + len(optimizers))]
        setting = study.chosen(optimizer_name) or settings(optimizer_name)[0]
        model = make_model(task, 0).train()
        optimizer = resolve(setting.spec).build(model, 1e-3)
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
        own = statistics.median(pair[1] for pair in pairs)
        study.times[optimizer_name] = {"model": model_time, "optimizer": own}
        print(f"{name} {optimizer_name}: {1e3 * model_time:.1f} + {1e3 * own:.1f} ms", flush=True)
    study.records.facts["timed"] = conditions()
    study.records.save()


def table(name: str, optimizers: tuple[str, ...]) -> list[str]:
    """Lines of a table: losses at 1x, 4x and 16x, the shortest schedule, its time, and state."""
    study = Study(name)
    short, times = SHORT[name], study.times
    unit = math.log(2) if name.startswith("enwik8") else 1.0
    rows = ["", f"| {name} | 1x | 4x | 16x | lr | shortest | its time | state |", "|---" * 8 + "|"]
    diverged = []
    adamw_bytes = study.records.select(optimizer="adamw")[0]["bytes"]
    for optimizer in ("adamw", *optimizers):
        if not (runs := study.records.select(optimizer=optimizer)):
            continue
        cells = []
        for horizon in (1, 4):
            best = study.best(optimizer, horizon, 1)
            loss = study.loss(best[0], horizon * short) if best else math.inf
            cells.append(f"{loss / unit:.3f}" if math.isfinite(loss) else "")
        setting = study.chosen(optimizer)
        if count := len(study.records.select(optimizer=optimizer, final=None)):
            diverged.append(f"{optimizer} {count}")
        final, share, time_share, lr = "", "", "", ""
        if setting is not None:
            finals = [run["final"] / unit for run in study.runs(setting, LONG * short)]
            spread = f" ± {statistics.stdev(finals):.3f}" if len(finals) > 1 else " (one seed)"
            final, lr = f"{statistics.fmean(finals):.3f}{spread}", f"{setting.lr:g}"
            if optimizer == "adamw":
                share, time_share = "1", "1"
            # a quarter of the steps is the run at 4x
            elif not any(study.runs(setting, study.part(k)) for k in range(LEAST + 2, PARTS)):
                share = "" if study.shortest(setting) is not None else "not reached"
            elif (least := study.shortest(setting)) is not None:
                share = f"{least:.2f}"
                if {"adamw", optimizer} <= times.keys():
                    ratio = sum(times[optimizer].values()) / sum(times["adamw"].values())
                    time_share = f"{least * ratio:.2f}"
            else:
                share = "not reached"
        cells += [final, lr, share, time_share, f"{runs[0]['bytes'] / adamw_bytes:.1f}"]
        rows.append(f"| {optimizer} | {' | '.join(cells)} |")
    if untuned := study.records.select(optimizer="untuned adamw"):
        chosen = study.chosen("adamw")
        assert chosen is not None
        pair = (untuned[0]["final"], study.runs(chosen, LONG * short)[0]["final"])
        losses = " | ".join(f"{final / unit:.3f}" for final in pair)
        rows.append(f"{name}, {UNTUNED}, and the setting above, seed 0 | {losses}")
    return rows + ([f"Diverged: {', '.join(diverged)}."] if diverged else [])


def figure(name: str, optimizers: tuple[str, ...], by: str) -> Plot | None:
    """Evaluation loss of the best settings at 16x, by "step" or by "time" of training."""
    study = Study(name)
    lines = []
    # peers only in the table: a plot has no more colours
    names = [name for name in ("adamw", *OPTIMIZERS) if ":" not in name]
    bits = name.startswith("enwik8")
    for colour, optimizer in enumerate(names):
        setting, seconds = study.chosen(optimizer), study.times.get(optimizer)
        if optimizer not in ("adamw", *optimizers) or setting is None:
            continue
        if by == "time" and seconds is None:
            continue
        run = study.runs(setting, LONG * SHORT[name])[0]
        width = 1.0 if seconds is None or by == "step" else sum(seconds.values())
        height = 1 / math.log(2) if bits else 1.0
        curve = zip(run["eval_steps"], run["eval_losses"], strict=True)
        lines.append(Line(optimizer, colour, [(x * width, y * height) for x, y in curve]))
    if not lines:
        return None
    losses = [loss for line in lines for _, loss in line.points[SETTLED:]]
    low, high = min(losses), max(losses)
    margin = 0.06 * (high - low)
    return Plot(
        f"{name}-by-{by}",
        f"{name}: evaluation loss at {LONG} times the steps of a short race",
        "Each optimizer at its best setting, seed 0.",
        "step" if by == "step" else "CPU seconds of training, one thread",
        f"{name}: {'bits per byte' if bits else study.task().unit}",
        lines,
        y_range=(low - margin, high + margin),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "time", "adamw", "table"))
    parser.add_argument("--task", default=",".join(SHORT))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the runs at 16x")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command != "table" and "heavyball:SOAP" in args.optimizers:
        import heavyball.utils  # type: ignore[import-not-found, unused-ignore]

        heavyball.utils.compile_mode = None  # would tune kernels for minutes per shape
    tasks, optimizers = args.task.split(","), tuple(args.optimizers.split(","))
    if unknown := set(tasks) - set(SHORT):
        parser.error(f"--task must be of {', '.join(SHORT)}, got {', '.join(sorted(unknown))}")
    for name in tasks:
        if args.command == "table":
            print("\n".join(table(name, optimizers)))
            for by in ("step", "time"):
                if (plot := figure(name, optimizers, by)) is not None:
                    path = DOCS / f"long_races-{plot.name}.svg"
                    write_atomically(path, [standalone(plot).encode()])
        elif args.command == "run":
            run(name, optimizers, args.seeds)
        elif args.command == "adamw":
            run_untuned(name)
        else:
            time_steps(name, optimizers)


if __name__ == "__main__":
    main()
