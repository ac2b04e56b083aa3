"""`isokron score`: which training examples speak for queries, and which against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from isokron.cli import options as o
from isokron.cli.errors import reported
from isokron.cli.sources import open_run
from isokron.cli.watching import Stages, watched

if TYPE_CHECKING:
    from isokron.attribution import Answers, Ask, Found, Run
    from isokron.tasks import Shown

SHOWN = 3  # of each query, in the terminal
WIDTH = 60  # characters of a text


def score(
    run: o.RunFolder,
    query: o.Queries = None,
    mode: o.Mode = "individual",
    unit: o.Unit = False,
    by_layer: o.ByLayer = False,
    no_store: o.Fly = False,
    damping: o.Damping = 0.1,
    damping_kind: o.DampingKind = "relative",
    top: o.Top = 10,
    name: Annotated[
        str | None, typer.Option(help="Of the scores' files.", rich_help_panel=o.SCORES)
    ] = None,
    self_influence: Annotated[
        bool,
        typer.Option(
            "--self",
            help="Influence of every example on itself instead: large for what is mislabelled or "
            "rare.",
            rich_help_panel=o.SCORES,
        ),
    ] = False,
    memory: o.Memory = None,
) -> None:
    """Score all training examples for one query or many.

    Positive: training on the example lowers the loss of the query.

    Examples:

      isokron score runs/digits --query eval:0-9

      isokron score runs/speeches --query "the Congress of the United States"
    """
    with reported(2):
        from isokron.attribution import Ask, read_queries

        budget = o.bytes_of(memory)
        ask = Ask(mode, unit, by_layer, no_store, damping, damping_kind)
        with watched() as watcher:
            opened = open_run(run, watcher)
        if self_influence == bool(query):
            raise ValueError("give --query, or --self for the influence of examples on themselves")
        queries = read_queries(opened.subject.task, query) if query else []
    with reported(1):
        if self_influence:
            show_self(opened, ask, top, budget)
            return
        from isokron.attribution import score as scoring

        with watched() as watcher:
            stages = Stages(watcher)
            answers = scoring(
                opened, queries, ask, count=top, name=name, progress=stages, memory=budget
            )
        show(answers)
        typer.echo(f"Scores: {opened.scores / answers.name}.safetensors and .json")


def show(answers: Answers, most: int = SHOWN) -> None:
    """The foremost examples of every query, a line each."""
    for answer in answers.each:
        typer.echo(f"\n{answer.query[:WIDTH]}: {words(answer.shown[0])}")
        for sign, some in (("+", answer.proponents), ("−", answer.opponents)):
            for found in some[:most]:
                typer.echo(line(sign, found))


def show_self(run: Run, ask: Ask, top: int, memory: int | None) -> None:
    """Write the influence of all examples on themselves, and show those of the most."""
    from isokron.attribution import Asker, self_influence, write_self
    from isokron.attribution.ranking import top as foremost
    from isokron.attribution.subject import shown_of

    with watched() as watcher:
        asker = Asker(run, ask) if memory is None else Asker(run, ask, memory)
        found = self_influence(asker, Stages(watcher))
    path = write_self(run, found)
    numbers, values = foremost(found, top).proponents
    ids = run.subject.ids
    for number, value in zip(numbers.tolist(), values.tolist(), strict=True):
        name = ids[number] if ids else str(number)
        typer.echo(f"    {value:12.5g}  {name:<20}  {words(shown_of(run.subject, number))}")
    typer.echo(f"Influence on themselves: {path}")


def line(sign: str, found: Found) -> str:
    return f"  {sign} {found.score:12.5g}  {found.id:<20}  {words(found.shown)}"


def words(shown: Shown, width: int = WIDTH) -> str:
    """What can be said of an example in one line."""
    text = " ".join(shown.text.split())
    text = text if len(text) <= width else text[: width - 1] + "…"
    parts = [shown.title, f"label {shown.label}" if shown.label else "", text]
    return ", ".join(part for part in parts if part)
