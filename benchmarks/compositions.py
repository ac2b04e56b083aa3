"""Does a composition improve a method? Final losses with and without it, in six short races.

    python benchmarks/compositions.py [--races 6] [--only polar]

Every entrant is trained with three learning rates on seed 0, with one more where the best is at the
edge, and with the best of them on two more seeds; initial weights and batches depend on the seed
alone. A composition improves a race if the mean over seeds of its loss minus the method's is below
zero by more than the standard deviation of that difference. One that can no longer improve four
races of six is not trained any further. One thread. Runs are in docs/benchmarks/compositions.json,
written after each; a second call continues with those that are missing.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from typing import Any, NamedTuple

import torch
from records import Records
from timing import conditions

from isokron.optimizers_by_name import resolve
from isokron.race.train import train
from isokron.tasks import load

# (task, steps), from cheap to expensive: what is decided early saves the long ones
RACES = [
    ("digits-tiny", 100),
    ("digits-small", 100),
    ("mnist-tiny", 150),
    ("mnist-small", 60),
    ("speeches-tiny", 300),
    ("speeches-tiny", 1000),
]
# composition → entrants without and with it. Only `polar` was kept: the runs of the other options,
# which are no longer there, are read from the saved file
COMPOSITIONS = {
    "polar": [
        ("soap", "soap(polar=True)"),
        ("soap", "soap(polar=True, graft=None)"),
        ("katie", "katie(polar=True)"),
    ],
    "normalize_rows": [
        ("soap(polar=True)", "soap(polar=True, normalize_rows=True)"),
        ("muon", "muon(normalize_rows=True)"),
    ],
    "cautious decay": [
        ("soap", "soap(decay='cautious')"),
        ("muon", "muon(decay='cautious')"),
    ],
    "tail average": [
        ("soap", "soap(average='tail')"),
        ("muon", "muon(average='tail')"),
    ],
}
LRS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # the middle three first
SEEDS = 3
NEEDED = 4


Race = tuple[str, int]


class Losses:
    """Final losses by race, entrant, learning rate and seed, on disk."""

    def __init__(self) -> None:
        self.records = Records("compositions")

    def final(self, race: Race, spec: str, lr: float, seed: int) -> float:
        """The final evaluation loss, infinite if the run diverged; trains where it is missing."""
        key = {"task": race[0], "steps": race[1], "optimizer": spec, "lr": lr, "seed": seed}
        final = self.records.once(partial(train_once, race, spec, lr, seed), **key)["final"]
        return math.inf if final is None else final

    def best(self, race: Race, spec: str) -> tuple[float, list[float]]:
        """The best learning rate of seed 0, and the losses of all seeds with it."""
        first, last = 1, len(LRS) - 1
        while True:
            lr = min(LRS[first:last], key=lambda lr: self.final(race, spec, lr, 0))
            # a best one at the edge of what was tried may not be the best
            if lr == LRS[first] and first > 0:
                first -= 1
            elif lr == LRS[last - 1] and last < len(LRS):
                last += 1
            else:
                break
        return lr, [self.final(race, spec, lr, seed) for seed in range(SEEDS)]


def train_once(race: Race, spec: str, lr: float, seed: int) -> dict[str, Any]:
    task, steps = race
    # before and after: only the final loss is compared
    run = train(load(task), resolve(spec), lr, seed, steps, evaluations=2)
    if run.status == "failed":
        raise RuntimeError(f"{task}, {steps} steps, {spec}, lr {lr:g}: {run.message}")
    return {"final": run.final if math.isfinite(run.final) else None}


class Comparison(NamedTuple):
    """A row of the first table, the difference, and whether it is an improvement."""

    row: str
    difference: str
    better: bool


def compare(losses: Losses, race: Race, base: str, composed: str) -> Comparison:
    lr, without = losses.best(race, base)
    composed_lr, with_it = losses.best(race, composed)
    differences = [b - a for a, b in zip(without, with_it, strict=True)]
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    better, difference = mean < -spread, f"{mean:+.4f} ± {spread:.4f}"
    row = (
        f"| {composed} | {race[0]}, {race[1]} | {statistics.fmean(without):.4f} ({lr:g}) "
        f"| {statistics.fmean(with_it):.4f} ({composed_lr:g}) | {difference} "
        f"| {'yes' if better else 'no'} |"
    )
    return Comparison(row, difference, better)


def tables(races: int = len(RACES), only: str = "") -> list[str]:
    """Final losses with and without every composition; then differences, a row per composition."""
    losses = Losses()
    pairs = [pair for name, pairs in COMPOSITIONS.items() if only in name for pair in pairs]
    compared: dict[tuple[str, str], list[Comparison]] = {pair: [] for pair in pairs}
    lines = ["| entrant | race, steps | without (lr) | with (lr) | difference | better |"]
    lines.append("|---|---|---|---|---|---|")
    for i, race in enumerate(RACES[:races]):
        for pair, comparisons in compared.items():
            improved = sum(comparison.better for comparison in comparisons)
            if len(comparisons) == i and improved + len(RACES) - i >= NEEDED:
                comparisons.append(compare(losses, race, *pair))
                lines.append(comparisons[-1].row)
    for (base, composed), comparisons in compared.items():
        cells = " | ".join(comparison.difference for comparison in comparisons)
        improved = sum(comparison.better for comparison in comparisons)
        lines.append(f"| {composed} | {base} | {cells} | {improved} of {len(comparisons)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--races", type=int, default=len(RACES), help="the first so many")
    parser.add_argument("--only", default="", help="compositions whose name has this word")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(conditions())
    print("\n".join(tables(options.races, options.only)))


if __name__ == "__main__":
    main()
