"""`isokron demo`: a short race on real text, then the training examples a model learned from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isokron.cli.errors import reported
from isokron.cli.progress import Display
from isokron.cli.race import compete
from isokron.cli.race import show as show_race
from isokron.cli.source import Source, open_run
from isokron.cli.terminal import show

STEPS = 150
# three values around each one's best, found by the full sweeps of `isokron race`
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (1e-2, 3e-2, 1e-1), "soap": (1e-2, 3e-2, 1e-1)}

# the model that is explained: training examples, steps on them, and bytes of text it writes
EXAMPLES, LEARNED, SAID = 2000, 600, 65


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the pages; an earlier demo in it is continued.")
    ] = Path("isokron-demo"),
) -> None:
    """Race three optimizers on a small language model, and show which examples taught it."""
    with reported(2):
        from isokron.race.race import Race

        race = Race("speeches-tiny", RATES, STEPS, 1, RATES)
    typer.echo("A byte-level language model learns from presidents' speeches.", err=True)
    result = compete(race, out, True, "Continue with the same command.")
    with reported(1):
        show_race(result)
        winner = result.winner
        if winner is not None:
            best = result.runs_of(winner.optimizer, winner.best_lr)[0]
            typer.echo(f"\nAfter {STEPS} steps the model trained by {winner.optimizer} writes:\n")
            typer.echo(f"{best.sample}\n")
    typer.echo("Which training examples make such a model say what it says?", err=True)
    with reported(1):
        page = explain(out / "attribution")
    typer.echo(f"\nPage of the optimizers: {(out / 'index.html').resolve()}")
    typer.echo(f"Page of the training examples: {page.resolve()}")


def explain(folder: Path) -> Path:
    """Train a model, let it write, and find the examples it learned that from; the page."""
    from isokron.attribution import read_queries

    source = Source(task="speeches-tiny", steps=LEARNED, lr=1e-2, examples=EXAMPLES)
    with Display() as progress:
        a = open_run(folder, progress, source)
        assert a.task is not None
        assert a.task.sample is not None
        text = a.task.sample(a.subject.model)
        said = text.encode()[:SAID].decode(errors="ignore")
        queries = read_queries(a.task, a.subject.model, [said, "eval:0"])
        scores = a.fit().score(queries, top=8)
        page = a.report()
    show(a, queries, scores)
    return page
