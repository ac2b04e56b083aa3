"""`isokron demo`: a short race on real text, then the training examples a model learned from."""

from pathlib import Path
from typing import Annotated

import typer

from isokron.cli.process import work
from isokron.cli.race import compete
from isokron.cli.source import Source, open_run
from isokron.cli.terminal import Display, show_scores

STEPS = 150
# three values around each one's best, found by the full sweeps of `isokron race`
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (1e-2, 3e-2, 1e-1), "soap": (1e-2, 3e-2, 1e-1)}
# the model that is explained: training examples, steps on them, and bytes of text it writes
EXAMPLES, LEARNED, WRITTEN = 2000, 600, 65


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the pages; an earlier demo in it is continued.")
    ] = Path("isokron-demo"),
) -> None:
    """Race three optimizers on a small language model, and show which examples taught it."""
    from isokron.attribution import read_queries
    from isokron.race.race import prepare

    race = prepare("speeches-tiny", RATES, STEPS, 1, RATES)
    typer.echo("A byte-level language model learns from presidents' speeches.", err=True)
    result = compete(race, out, resume=True)
    winner = result.winner
    if winner is not None:
        best = result.runs_of(winner.optimizer, winner.best_lr)[0]
        typer.echo(f"\nAfter {STEPS} steps the model trained by {winner.optimizer} writes:\n")
        typer.echo(f"{best.sample}\n")
    typer.echo("Which training examples make such a model say what it says?", err=True)
    source = Source(task="speeches-tiny", steps=LEARNED, lr=1e-2, examples=EXAMPLES)
    with work(), Display() as progress:
        a = open_run(out / "attribution", progress, source)
        assert a.task is not None
        assert a.task.sample is not None
        text = a.task.sample(a.subject.model).encode()[:WRITTEN].decode(errors="ignore")
        queries = read_queries(a.task, a.subject.model, [text, "eval:0"])
        scores = a.fit().score(queries, top=8)
        page = a.report()
    show_scores(a, queries, scores)
    typer.echo(f"\nPage of the optimizers: {(out / 'index.html').resolve()}")
    typer.echo(f"Page of the training examples: {page.resolve()}")
