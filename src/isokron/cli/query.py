"""`isokron query`: ask a run again and again, by keyboard or through a pipe."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isokron.cli import options as o
from isokron.cli.errors import complain, reported
from isokron.cli.score import line, words
from isokron.cli.sources import open_run
from isokron.cli.watching import watched

if TYPE_CHECKING:
    from isokron.attribution import Asker, Found

PROMPT = "query> "


def query(
    run: o.RunFolder,
    top: o.Top = 5,
    unit: o.Unit = False,
    damping: o.Damping = 0.1,
    damping_kind: o.DampingKind = "relative",
    index: Annotated[
        str,
        typer.Option(
            help="exact (products with all rows), or faiss, if that is installed.",
            rich_help_panel=o.SCORES,
        ),
    ] = "exact",
    as_json: Annotated[
        bool, typer.Option("--json", help="An object a line.", rich_help_panel=o.SCORES)
    ] = False,
    memory: o.Memory = None,
) -> None:
    """Ask a run's store, one query a line: a text, eval:3 or train:7.

    Examples:

      isokron query runs/speeches

      echo "eval:0" | isokron query runs/digits --json
    """
    with reported(2):
        from isokron.attribution import Ask, Asker
        from isokron.attribution.ranking import INDICES
        from isokron.attribution.scoring import MEMORY

        if index not in INDICES:
            raise ValueError(f"--index must be one of {INDICES}, got {index!r}")
        budget = o.bytes_of(memory) or MEMORY
        with watched() as watcher:
            opened = open_run(run, watcher)
        ask = Ask(unit=unit, damping=damping, kind=damping_kind)
        asker = Asker(opened, ask, budget)
        if asker.store is None:
            raise ValueError(f"{run} has no store to search; run: isokron build {run}")
    with reported(1):
        searcher = Searcher(asker, index)
    failed = False
    for text in lines():
        try:
            proponents, opponents = searcher.find(text, top)
        except (ValueError, FloatingPointError) as error:
            failed = True
            complain(str(error), 1)
            continue
        if as_json:
            typer.echo(json.dumps(record(text, proponents, opponents), ensure_ascii=False))
        else:
            for sign, some in (("+", proponents), ("−", opponents)):
                for found in some:
                    typer.echo(line(sign, found))
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


class Searcher:
    """Finds the foremost examples for a query in words."""

    def __init__(self, asker: Asker, index: str) -> None:
        from isokron.attribution.ranking import Faiss

        self.asker = asker
        _ = asker.encoding, asker.inverse  # what is wrong with them is said before the first query
        self.faiss = None
        if index == "faiss":
            assert asker.store is not None
            self.faiss = Faiss(asker.store, asker.memory, asker.ask.unit)

    def find(self, text: str, count: int) -> tuple[list[Found], list[Found]]:
        """Proponents, and opponents, the foremost first."""
        from isokron.attribution import Found, read_queries
        from isokron.attribution.ranking import top
        from isokron.attribution.subject import shown_of

        subject = self.asker.run.subject
        queries = read_queries(subject.task, [text])
        if self.faiss is not None:
            found = self.faiss.top(self.asker.rows(queries[:1]), count)
        else:
            found = top(self.asker.scores(queries[:1]).of[0], count)

        def named(pair: tuple[Any, Any]) -> list[Found]:
            ids = subject.ids
            return [
                Found(i, ids[i] if ids else str(i), value, shown_of(subject, i))
                for i, value in zip(pair[0].tolist(), pair[1].tolist(), strict=True)
            ]

        return named(found.proponents), named(found.opponents)


def lines() -> Any:
    """Queries from the keyboard, with a prompt, or from a pipe; none of them empty."""
    asked = sys.stdin.isatty()
    while True:
        if asked:
            typer.echo(PROMPT, nl=False, err=True)
        text = sys.stdin.readline()
        if not text:
            if asked:
                typer.echo("", err=True)
            return
        if text.strip():
            yield text.rstrip("\n")


def record(text: str, proponents: list[Found], opponents: list[Found]) -> dict[str, Any]:
    def listed(some: list[Found]) -> list[dict[str, Any]]:
        return [
            {"example": f.example, "id": f.id, "score": f.score, "text": words(f.shown, 10**6)}
            for f in some
        ]

    return {"query": text, "proponents": listed(proponents), "opponents": listed(opponents)}
