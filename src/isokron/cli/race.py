"""`isokron race`: compare optimizers on a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isokron.cli.errors import reported

if TYPE_CHECKING:
    from isokron.race import Result
    from isokron.race.conduct import Watcher
    from isokron.race.plan import Plan

CONTENDERS = "What races"
LENGTH = "How long"
FILES = "Files"
LOG_WIDTH = 250  # of a table with every column


def race(
    task: Annotated[
        str,
        typer.Option(
            help="A built-in task (see: isokron tasks), module:function or file.py:function.",
            rich_help_panel=CONTENDERS,
        ),
    ] = "digits",
    optimizers: Annotated[
        str,
        typer.Option(
            help="adamw, muon, shampoo, soap, katie, quad, skew, natural, sign, or any "
            "module:name, with options in parentheses: "
            "muon(momentum=0.9),torch.optim:SGD(momentum=0.9).",
            rich_help_panel=CONTENDERS,
        ),
    ] = "adamw,muon",
    lr: Annotated[
        list[str] | None,
        typer.Option(
            help="Learning rates for all (1e-3,3e-3) or for one (muon=0.01,0.02); may be "
            "repeated. Default: each optimizer's own sweep, extended while its best is at an edge.",
            rich_help_panel=CONTENDERS,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of a run.", rich_help_panel=LENGTH)] = 300,
    seeds: Annotated[int, typer.Option(help="Runs per learning rate.", rich_help_panel=LENGTH)] = 2,
    shortest: Annotated[
        bool,
        typer.Option(
            "--shortest",
            help="Also train on shorter schedules, to find the shortest that reaches adamw's "
            "final loss; may be added with --resume.",
            rich_help_panel=LENGTH,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="New folder; without, runs/race-<task>.", rich_help_panel=FILES),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in --out.", rich_help_panel=FILES)
    ] = False,
) -> None:
    """Compare optimizers fairly: same weights, same batches, each at its best learning rate.

    Shows a table and writes a page with the curves. adamw always takes part as the yardstick.
    """
    with reported(2):
        from isokron.race.optimizers import split_specs
        from isokron.race.plan import make_plan
        from isokron.race.store import slug

        rates = parse_rates(lr or [])
        plan = make_plan(task, split_specs(optimizers), steps, seeds, rates, shortest)
    folder = out if out is not None else Path("runs") / f"race-{slug(task)}"
    result = conduct(plan, folder, resume, "Continue with the same command and --resume.")
    with reported(1):
        show(result)
    typer.echo(f"Page: {(folder / 'index.html').resolve()}")
    if result.winner is None:
        raise typer.Exit(1)


def parse_rates(texts: Sequence[str]) -> dict[str, list[float]] | None:
    """`a,b` → for all, `name=a,b` → for one; None if nothing is given."""
    from isokron.race.plan import EVERY

    rates: dict[str, list[float]] = {}
    for text in texts:
        name, _, numbers = text.rpartition("=")
        try:
            rates[name or EVERY] = [float(number) for number in numbers.split(",")]
        except ValueError:
            raise ValueError(
                f"--lr {text!r} is not a list of numbers; write 1e-3,3e-3 or muon=0.01,0.02"
            ) from None
    return rates or None


def conduct(plan: Plan, folder: Path, resume: bool, again: str) -> Result:
    """Race with progress on stderr; Ctrl-C shows what is finished, says `again`, exits 130."""
    from isokron.race.conduct import Interrupted, execute
    from isokron.race.plan import settings
    from isokron.race.store import locked, open_store

    with reported(1):
        found = settings(plan)
    with ExitStack() as stack:
        with reported(2):
            store = open_store(folder, found, resume)  # reads what is there, before any work
            stack.enter_context(locked(folder))
        for note in plan.notes:
            typer.echo(note, err=True)
        try:
            with reported(1):
                return watched(lambda watch: execute(plan, found, store, watch))
        except Interrupted as interrupted:
            if interrupted.result.runs:
                show(interrupted.result)
                typer.echo(f"Page: {(folder / 'index.html').resolve()}")
            typer.echo(f"Interrupted. {again}", err=True)
            raise typer.Exit(130) from None


def watched(work: Callable[[Watcher], Result]) -> Result:
    """Do the work under a live display, or under plain lines where there is no terminal."""
    from rich.console import Console

    from isokron.race.progress import LineProgress, LiveProgress

    console = Console(stderr=True)
    if console.is_terminal:
        with LiveProgress(console) as live:
            return work(live)
    return work(LineProgress(console.file))


def show(result: Result) -> None:
    """The table and how to read it, on stdout."""
    from rich.console import Console

    from isokron.race.table import notes, rich_table

    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH, color_system=None)  # a log does not wrap
    console.print(rich_table(result, console.width))
    for note in notes(result):
        console.print(note, style="dim", markup=False, highlight=False)
