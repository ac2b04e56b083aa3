"""`isokron race`: compare optimizers on a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isokron.cli.encoding import echo
from isokron.cli.process import work
from isokron.cli.source import TaskSource
from isokron.cli.terminal import Display, fitted_table, output
from isokron.report.render import visible

if TYPE_CHECKING:
    from isokron.race import Result
    from isokron.race.race import Rate

OPTIMIZERS = (
    "Comma-separated: adamw, muon, shampoo, soap, katie, quad, skew, natural, sign or any "
    "module:name, with options in parentheses: muon(momentum=0.9), torch.optim:SGD(momentum=0.9)."
)
RATES = (
    "Learning rates of all optimizers (1e-3,3e-3) or of one (muon=0.01,0.02). 0.005x10: 0.005 for "
    "hidden matrices, 10 times that for everything else. May be repeated. Default: all optimizers "
    "are tuned in the same way, with both rates."
)
SEEDS = "Runs with the best setting of each optimizer or, with --lr, with each learning rate."
SHORTEST = "Also find the shortest schedule with which each optimizer reaches adamw's final loss."
OUT = "New folder for the results. Default: runs/race-<task>."
HELD_OUT = 0.1  # of the documents of --data, for evaluation


def race(
    source: TaskSource,
    optimizers: Annotated[str, typer.Option(help=OPTIMIZERS, metavar="LIST")] = "adamw,muon",
    lr: Annotated[list[str] | None, typer.Option(help=RATES, metavar="RATES")] = None,
    steps: Annotated[int, typer.Option(help="Training steps per run.")] = 300,
    seeds: Annotated[int, typer.Option(help=SEEDS)] = 2,
    shortest: Annotated[bool, typer.Option("--shortest", help=SHORTEST)] = False,
    out: Annotated[Path | None, typer.Option(help=OUT)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the race in --out.")] = False,
) -> None:
    """Compare optimizers: same weights, same batches, each with its best setting.

    Shows a table and writes a page with the curves. adamw always takes part for comparison.
    Without --task and --model the task is digits; a tenth of --data is held out for evaluation.

    Examples:
      isokron race --task digits --optimizers adamw,muon
      isokron race --task speeches-tiny --optimizers soap --lr 0.01,0.03 --seeds 1
      isokron race --optimizers 'muon(momentum=0.9),torch.optim:SGD' --out runs/mine
      isokron race --model FOLDER --data train.jsonl --optimizers soap --lr 1e-4,3e-4
    """
    from isokron.optimizers_by_name import split_specs
    from isokron.race.race import Race, race_folder, slug

    rates = parse_rates(lr or [])
    if source == TaskSource():
        source = TaskSource(task="digits")
    source.check()
    task = source.task or source.load_task(HELD_OUT)
    prepared = Race(task, split_specs(optimizers), steps, seeds, rates, shortest)
    folder = (
        out or Path("runs") / f"race-{slug(source.task or Path(str(source.model)).resolve().name)}"
    )
    advice = "continue with the same command and --resume"
    # opened outside of `work`, since an unusable folder is a wrong call
    with race_folder(folder, prepared.settings, resume), work(advice):
        with Display() as progress:
            result = prepared.run(folder, progress)
        if result.runs or result.probes:
            show(result, folder)
        if not result.complete:
            raise KeyboardInterrupt
    if result.winner is None:
        raise typer.Exit(1)


def parse_rates(texts: Sequence[str]) -> dict[str, list[Rate]] | None:
    """Learning rates from `a,b` (all optimizers) and `name=a,b` (one); None without any."""
    from isokron.race.race import EVERY

    rates: dict[str, list[Rate]] = {}
    for text in texts:
        name, _, numbers = text.rpartition("=")
        try:
            pairs = [[float(n) for n in number.split("x", 1)] for number in numbers.split(",")]
            rates.setdefault(name or EVERY, []).extend(
                (p[0], p[-1]) if p[1:] else p[0] for p in pairs
            )
        except ValueError:
            remedy = "write 1e-3,3e-3 or muon=0.01,0.02 or adamw=0.005x10"
            raise ValueError(f"--lr {text!r} is not a list of numbers; {remedy}") from None
    return rates or None


def show(result: Result, folder: Path) -> None:
    """Print the table, how to read it, and where the page is."""
    from isokron.race.page import sentences, table

    cells, winner, console = table(result), result.winner, output()
    bold = [row[0] for row in cells].index(winner.optimizer) if winner is not None else -1
    title = "{task}, {steps} steps, {unit}".format(**result.settings)
    console.print(fitted_table(title, cells, console.width, bold))
    console.print(visible("\n".join(sentences(result)[2:])), style="dim")
    echo(f"Page: {(folder / 'index.html').resolve()}")
