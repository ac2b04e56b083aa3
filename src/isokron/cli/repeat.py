"""`isokron repeat`: a run once more, from what its run.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isokron.cli import options as o
from isokron.cli.errors import reported
from isokron.cli.sources import open_run, recorded
from isokron.cli.watching import Stages, watched


def repeat(
    run: o.RunFolder,
    out: Annotated[Path, typer.Argument(help="A new folder.", metavar="OUT")],
) -> None:
    """Repeat a run in another folder: its training, curvature, store, scores and page.

    With the same versions on the same machine the files have the same bytes.

    Example:

      isokron repeat runs/digits runs/digits-again
    """
    with reported(2):
        from isokron.attribution.answers import read_answers
        from isokron.attribution.run import read_record

        record = read_record(run)
        asked = read_answers(run) if any((run / "scores").glob("*.json")) else []
    with watched() as watcher, reported(1):
        from isokron.attribution import Ask, Build, Fit, build, fit, read_queries, report, score
        from isokron.distributed.team import in_turn

        again, stages = open_run(out, watcher, recorded(record)), record["stages"]
        progress = Stages(watcher)
        if "fit" in stages:
            fit(again, Fit(**stages["fit"]), progress)
        if "build" in stages:
            build(again, Build(**stages["build"]), progress)
        for each in asked:
            queries = read_queries(again.subject.task, each["queries"])
            ask, count = Ask(**each["ask"]), each["count"]
            score(again, queries, ask, count=count, name=each["name"], progress=progress)
        with in_turn(again.ranks, "writing the page"):
            if again.leads and (run / "report.html").exists():
                report(out)
    typer.echo(f"Repeated {run} in {out}")
