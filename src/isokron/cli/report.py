"""`isokron report`: the page of a run."""

from __future__ import annotations

import typer

from isokron.cli import options as o
from isokron.cli import several
from isokron.cli.errors import reported


def report(run: o.RunFolder, top: o.Top = 10) -> None:
    """Write a page that shows each query with the examples that speak for it and against it.

    It needs neither model nor data.

    Example:

      isokron report runs/digits
    """
    with reported(2):
        from isokron.attribution import report as reporting
        from isokron.attribution.page.report import PAGE
        from isokron.distributed.team import in_turn

        with in_turn(several.ranks(), "writing the page"):
            path = reporting(run, top=top) if several.leads() else run / PAGE
    typer.echo(f"Page: {path.resolve()}")
