"""Does a composition improve a method? Final losses with and without it, in six short races.

    OMP_NUM_THREADS=1 python benchmarks/compositions.py [--out docs/benchmarks/compositions.json]

Every entrant is trained with three learning rates on seed 0, with one more where the best is at the
edge, and with the best of them on two more seeds; initial weights and batches depend on the seed
alone. A composition improves a race if the mean over seeds of its loss minus the method's is below
zero by more than the standard deviation of that difference. One that can no longer improve four
races of six is not trained any further. Runs are saved one by one, and a second call continues with
those that are missing.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

from timing import conditions

from isokron.files import write_json
from isokron.optimizers_by_name import resolve
from isokron.race import train
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
    """Final losses by race, entrant, learning rate and seed, in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved = json.loads(path.read_text()) if path.exists() else {}

    def final(self, race: Race, spec: str, lr: float, seed: int) -> float:
        """The final evaluation loss, infinite if the run diverged; trains where it is missing."""
        task, steps = race
        title, key = f"{task}, {steps} steps", f"lr {lr:g}, seed {seed}"
        runs = self.saved.setdefault(title, {}).setdefault(spec, {})
        if key not in runs:
            run = train.train(load(task), resolve(spec), lr, seed, steps)
            if run.status == "failed":
                raise RuntimeError(f"{title}, {spec}, {key}: {run.message}")
            runs[key] = run.final if math.isfinite(run.final) else None
            write_json(self.path, self.saved)
        return math.inf if runs[key] is None else runs[key]

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


def improves(losses: Losses, race: Race, base: str, composed: str) -> bool:
    """Print one row of the table, and say whether it is an improvement beyond the spread."""
    lr, without = losses.best(race, base)
    composed_lr, with_it = losses.best(race, composed)
    differences = [b - a for a, b in zip(without, with_it, strict=True)]
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    better = mean < -spread
    print(
        f"| {composed} | {race[0]}, {race[1]} | {statistics.fmean(without):.4f} ({lr:g}) "
        f"| {statistics.fmean(with_it):.4f} ({composed_lr:g}) | {mean:+.4f} ± {spread:.4f} "
        f"| {'yes' if better else 'no'} |",
        flush=True,
    )
    return better


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/compositions.json"))
    losses = Losses(parser.parse_args().out)
    train.EVALUATIONS = 2  # before and after: only the final loss is compared
    pairs = [pair for entrants in COMPOSITIONS.values() for pair in entrants]
    improved, raced = dict.fromkeys(pairs, 0), dict.fromkeys(pairs, 0)
    print(conditions())
    print("| entrant | race, steps | without (lr) | with (lr) | difference | better |")
    print("|---|---|---|---|---|---|")
    for i, race in enumerate(RACES):
        for pair in pairs:
            if improved[pair] + len(RACES) - i >= NEEDED:
                improved[pair] += improves(losses, race, *pair)
                raced[pair] += 1
    for composition, entrants in COMPOSITIONS.items():
        for base, composed in entrants:
            count = f"{improved[base, composed]} of {raced[base, composed]} races improve"
            print(f"{composition}: {composed} against {base}: {count}")


if __name__ == "__main__":
    main()
