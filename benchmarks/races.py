"""Races on every built-in task: who reaches tuned AdamW's loss, by which schedule, in what time.

    python benchmarks/races.py [--out runs/races] [--seeds 3] [--task NAME,NAME]

Each is `isokron race --shortest` in a folder of its own and goes on where it was stopped. What is
printed last is the table of the docs: for every optimizer its final loss, the shortest schedule of
its own that ends at or below AdamW's final loss, and the time of that schedule, both as ratios to
AdamW's.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from records import recorded
from timing import conditions

STEPS = {
    "digits-tiny": 100,
    "digits-small": 100,
    "mnist-tiny": 150,
    "mnist-small": 150,
    "speeches-tiny": 150,
    "speeches-small": 120,
}
OPTIMIZERS = "adamw,shampoo,soap,katie"


def race(task: str, optimizers: str, seeds: int, out: Path) -> dict[str, Any]:
    """Race, or go on with it, and give what race.json says."""
    command = ["-m", "isokron", "race", "--task", task, "--optimizers", optimizers, "--shortest"]
    command += ["--steps", str(STEPS[task]), "--seeds", str(seeds), "--out", str(out)]
    resume = ["--resume"] if out.exists() else []
    subprocess.run([sys.executable, *command, *resume], check=True)
    return json.loads((out / "race.json").read_text())


def rows(task: str, result: dict[str, Any]) -> list[str]:
    """A line of Markdown an optimizer."""
    standings = {standing["optimizer"]: standing for standing in result["standings"]}
    lines = []
    for name, standing in standings.items():
        loss = f"{standing['final']:.4f} ± {standing['spread'] or 0:.4f}"
        found = standing["shortest"]
        reached = "1" if name == "adamw" else "not reached"
        took = reached
        if found:
            reached = f"{found['share']:.2f} ({found['steps']})"
            took = f"{found['time_share']:.2f}"
        lr = f"{standing['best_lr']:g}"
        lines.append(f"| {task} | {name} | {lr} | {loss} | {reached} | {took} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/races"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", default=",".join(STEPS))
    parser.add_argument("--optimizers", default=OPTIMIZERS)
    args = parser.parse_args()
    tasks = args.task.split(",")
    if unknown := set(tasks) - set(STEPS):
        parser.error(f"--task must be of {', '.join(STEPS)}, got {', '.join(sorted(unknown))}")
    results = {task: race(task, args.optimizers, args.seeds, args.out / task) for task in tasks}
    with recorded("races"):
        print(f"\n{conditions()}, {args.seeds} seeds")
        print("| task | optimizer | lr | final loss | shortest schedule | its time |")
        print("|---|---|---|---|---|---|")
        for task, result in results.items():
            print("\n".join(rows(task, result)))


if __name__ == "__main__":
    main()
