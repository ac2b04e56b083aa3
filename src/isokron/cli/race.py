"""`isokron race`: compare optimizers on a task."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isokron.cli.errors import reported
from isokron.cli.progress import Display, fitted_table, show_table

if TYPE_CHECKING:
    from isokron.race import Result
    from isokron.race.race import Race

TASK = "A built-in task (see: isokron tasks), module:function or file.py:function."
OPTIMIZERS = (
    "adamw, muon, shampoo, soap, katie, quad, skew, natural, sign, or any module:name, with "
    "options in parentheses: muon(momentum=0.9),torch.optim:SGD(momentum=0.9)."
)
RATES = (
    "Learning rates for all optimizers (1e-3,3e-3) or for one (muon=0.01,0.02). May be repeated; "
    "values for the same optimizer are joined. Default: each optimizer's own sweep, extended "
    "while its best value is at an edge."
)
SHORTEST = (
    "Also train on shorter schedules, to find the shortest that reaches adamw's final loss; may "
    "be added with --resume."
)


def race(
    task: Annotated[str, typer.Option(help=TASK)] = "digits",
    optimizers: Annotated[str, typer.Option(help=OPTIMIZERS)] = "adamw,muon",
    lr: Annotated[list[str] | None, typer.Option(help=RATES)] = None,
    steps: Annotated[int, typer.Option(help="Training steps of a run.")] = 300,
    seeds: Annotated[int, typer.Option(help="Runs per learning rate.")] = 2,
    shortest: Annotated[bool, typer.Option("--shortest", help=SHORTEST)] = False,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the results. Default: runs/race-<task>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the race in --out.")] = False,
) -> None:
    """Compare optimizers fairly: same weights, same batches, each at its best learning rate.

    Shows a table and writes a page with the curves. adamw always takes part as the yardstick.
    """
    with reported(2):
        from isokron.optimizers_by_name import YARDSTICK, split_specs
        from isokron.race.race import Race, slug

        specs = split_specs(optimizers)
        prepared = Race(task, specs, steps, seeds, parse_rates(lr or []), shortest)
    folder = out if out is not None else Path("runs") / f"race-{slug(task)}"
    added = "" if YARDSTICK in specs else f"{YARDSTICK} takes part as the yardstick"
    again = "Continue with the same command and --resume."
    result = compete(prepared, folder, resume, again, added)
    with reported(1):
        show(result)
    typer.echo(f"Page: {(folder / 'index.html').resolve()}")
    if result.winner is None:
        raise typer.Exit(1)


def parse_rates(texts: Sequence[str]) -> dict[str, list[float]] | None:
    """`a,b` → for all, `name=a,b` → for one, joined if repeated; None without any."""
    from isokron.race.race import EVERY

    rates: dict[str, list[float]] = {}
    for text in texts:
        name, _, numbers = text.rpartition("=")
        try:
            rates.setdefault(name or EVERY, []).extend(map(float, numbers.split(",")))
        except ValueError:
            remedy = "write 1e-3,3e-3 or muon=0.01,0.02"
            raise ValueError(f"--lr {text!r} is not a list of numbers; {remedy}") from None
    return rates or None


def compete(race: Race, folder: Path, resume: bool, again: str, note: str = "") -> Result:
    """Race with progress on stderr; Ctrl-C shows the finished runs, prints `again`, exits 130."""
    from isokron.race.race import race_folder

    with ExitStack() as stack:
        # before any work: reads the runs in the folder
        with reported(2):
            stack.enter_context(race_folder(folder, race.settings, resume))
        with reported(1), Display() as progress:
            if note:
                progress(note, 0, 0)
            result = race.run(folder, progress)
    if not result.complete:
        if result.runs:
            show(result)
            typer.echo(f"Page: {(folder / 'index.html').resolve()}")
        typer.echo(f"Interrupted. {again}", err=True)
        raise typer.Exit(130)
    return result


def show(result: Result) -> None:
    """Print the table and how to read it."""
    from isokron.race.page import sentences, table

    cells, winner = table(result), result.winner
    best = [row[0] for row in cells].index(winner.optimizer) if winner is not None else -1
    title = "{task}, {steps} steps, {unit}".format(**result.settings)
    show_table(partial(fitted_table, title, cells, bold=best), sentences(result)[2:])
