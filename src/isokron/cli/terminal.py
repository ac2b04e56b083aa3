"""What the commands on a run print: top examples, times and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from isokron.attribution import Attributor, Query, Scores
    from isokron.tasks import Shown

SHOWN = 3  # examples of each sign and query
WIDTH = 60  # characters of a text


class Clock:
    """Seconds by stage, and the peak memory of the process."""

    def __init__(self) -> None:
        self.stages = {"load": time.perf_counter()}

    def start(self, stage: str) -> None:
        self.stages[stage] = time.perf_counter()

    def summary(self) -> str:
        names, starts = list(self.stages), [*self.stages.values(), time.perf_counter()]
        parts = [f"{n} {b - a:.1f} s" for n, a, b in zip(names, starts, starts[1:], strict=False)]
        return f"Time: {', '.join(parts)}; peak memory {peak_memory()}"


def peak_memory() -> str:
    from isokron.attribution.memory import readable

    try:
        import resource
    except ImportError:  # not a POSIX system
        return "unknown"
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return readable(size if sys.platform == "darwin" else 1024 * size)


def show(a: Attributor, queries: Sequence[Query], scores: Scores, most: int = SHOWN) -> None:
    """The top examples of every query, a line each, with their share of the positive influence."""
    if scores.noise is not None:
        typer.echo(
            f"\nProjected scores: rank correlation {scores.noise.spearman:.2f} with exact ones on "
            f"{scores.noise.sample} examples"
        )
    one_by_one = len(scores) == len(queries)
    for number, top in enumerate(scores.top(most)):
        asked = queries[number] if one_by_one else queries[0]
        name = asked.name if one_by_one else f"{len(queries)} queries"
        text = "".join(asked.shown[0].tokens) if asked.shown[0].generated else ""
        typer.echo(f"\n{name[:WIDTH]}{' → ' if text else ': '}{text or words(asked.shown[0])}")
        positive = float(scores[number].clamp_min(0).sum()) or 1.0
        for sign, ranked in (("+", top.proponents), ("−", top.opponents)):
            for entry in ranked:
                shown = words(a.show(a.data.batch([entry.example]))[0])
                typer.echo(f"  {sign} {abs(entry.score) / positive:7.2%}  {entry.id:<20}  {shown}")
        checked = scores.answers[number]["verify"] if scores.answers else None
        if checked is not None:
            groups = ("proponents", "random", "opponents")
            moves = [f"{g} {checked[g]:+.3g}" for g in groups if checked[g] is not None]
            before = f"{checked['before']:.3g}"
            typer.echo(f"  one step changed the loss of {before} nats: {', '.join(moves)}")


def show_self(a: Attributor, top: int, damping: float | None, store: bool | None) -> None:
    """Write the influence of all examples on themselves, and show the largest."""
    from safetensors.torch import save

    from isokron.distributed.team import in_turn
    from isokron.files import write_atomically

    values = a.self_influence(damping, store)
    path = a.folder.path / "self.safetensors"
    with in_turn(a.subject.ranks, "writing scores"):
        if a.folder.leads:
            write_atomically(path, [save({"self_influence": values.contiguous()})])
    for number in values.argsort(descending=True, stable=True)[:top].tolist():
        shown = words(a.show(a.data.batch([number]))[0])
        typer.echo(f"    {float(values[number]):12.5g}  {a.data.ids[number]:<20}  {shown}")
    typer.echo(f"Influence of examples on themselves: {path}")


def records(
    a: Attributor, queries: Sequence[Query], scores: Scores, count: int
) -> Iterator[dict[str, Any]]:
    for asked, top in zip(queries, scores.top(count), strict=True):
        sides = {
            side: [
                {
                    **ranked._asdict(),
                    "text": words(a.show(a.data.batch([ranked.example]))[0], 10**6),
                }
                for ranked in getattr(top, side)
            ]
            for side in ("proponents", "opponents")
        }
        yield {"query": asked.name, **sides}


def words(shown: Shown, width: int = WIDTH) -> str:
    """An example in one line."""
    text = " ".join(shown.text.split())
    text = text if len(text) <= width else text[: width - 1] + "…"
    parts = [shown.title, f"label {shown.label}" if shown.label else "", text]
    return ", ".join(part for part in parts if part)
