"""`isokron demo`: a short race on real text, in about a minute."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from isokron.cli.errors import reported
from isokron.cli.race import conduct, show

STEPS = 150
# three values around each one's best, found by the full sweeps of `isokron race`
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "muon": (1e-2, 3e-2, 1e-1), "soap": (1e-2, 3e-2, 1e-1)}

# what may differ between two demos, which replace each other; any other race is somebody's work
VARYING = ("torch", "isokron", "threads", "machine", "fingerprint")


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder of the page; an earlier demo in it is replaced.")
    ] = Path("isokron-demo"),
) -> None:
    """Train a small language model with three optimizers and show which was quickest."""
    with reported(2):
        from isokron.race.plan import make_plan, settings
        from isokron.race.store import holds

        plan = make_plan("speeches-tiny", RATES, STEPS, 1, RATES)
        if holds(out, settings(plan), but=VARYING):
            shutil.rmtree(out)
    typer.echo("A byte-level language model learns from presidents' speeches.", err=True)
    result = conduct(plan, out, False, "Run it again from the start with the same command.")
    with reported(1):
        show(result)
        winner = result.winner
        if winner is not None:
            best = result.runs_of(winner.optimizer, winner.best_lr)[0]
            typer.echo(f"\nAfter {STEPS} steps the model trained by {winner.optimizer} writes:\n")
            typer.echo(f"{best.sample}\n")
    typer.echo(f"Page: {(out / 'index.html').resolve()}")
