"""`isokron demo`: a short race on real text, then what made its model say so, in two minutes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from isokron.cli.errors import reported
from isokron.cli.race import conduct
from isokron.cli.race import show as show_race
from isokron.cli.score import show
from isokron.cli.sources import Source, open_run
from isokron.cli.watching import Stages, watched

STEPS = 150
# three values around each one's best, found by the full sweeps of `isokron race`
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (1e-2, 3e-2, 1e-1), "soap": (1e-2, 3e-2, 1e-1)}

# the model that is explained: its training examples, steps over them, and bytes of what it says
EXAMPLES, LEARNED, SAID = 2000, 600, 65

# what may differ between two demos, which replace each other; any other race is somebody's work
VARYING = ("torch", "isokron", "threads", "machine", "fingerprint")


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder of the page; an earlier demo in it is replaced.")
    ] = Path("isokron-demo"),
) -> None:
    """Train a small language model with three optimizers, and show what made it say so."""
    with reported(2):
        from isokron.race.plan import make_plan, settings
        from isokron.race.store import holds

        plan = make_plan("speeches-tiny", RATES, STEPS, 1, RATES)
        if holds(out, settings(plan), but=VARYING):
            shutil.rmtree(out)
    typer.echo("A byte-level language model learns from presidents' speeches.", err=True)
    result = conduct(plan, out, False, "Run it again from the start with the same command.")
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
    """Train a model, let it write, and find what it has that from; the page that shows it."""
    from isokron.attribution import Build, build, fit, read_queries, report, score

    source = Source(task="speeches-tiny", steps=LEARNED, lr=1e-2, examples=EXAMPLES)
    with watched() as watcher:
        stages = Stages(watcher)
        run = open_run(folder, watcher, source)
        task = run.subject.task
        assert task.sample is not None
        text = task.sample(run.subject.model)
        fit(run, progress=stages)
        build(run, Build(dim=16), stages)
        said = text.encode()[:SAID].decode(errors="ignore")
        answers = score(run, read_queries(task, [said, "eval:0"]), count=8, progress=stages)
        page = report(folder)
    show(answers)
    return page
