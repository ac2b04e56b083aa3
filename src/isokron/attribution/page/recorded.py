"""Answers as they were written down, read back as values: neither model nor data is needed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isokron.attribution.answers import Answer, Found, read_answers
from isokron.attribution.asking import Ask
from isokron.tasks import Shown


@dataclass(frozen=True, eq=False)
class Recorded:
    """One set of queries: its name, how it was asked, and what was found."""

    name: str
    ask: Ask
    each: tuple[Answer, ...]
    layers: tuple[str, ...]


def read_recorded(folder: Path, top: int | None = None) -> list[Recorded]:
    """All sets of a run. `top`: at most so many examples each way, None for all there are."""
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    return [_recorded(record, folder, top) for record in read_answers(folder)]


def _recorded(record: Mapping[str, Any], folder: Path, top: int | None) -> Recorded:
    try:
        return Recorded(
            str(record["name"]),
            Ask(**record["ask"]),
            tuple(_answer(each, top) for each in record["answers"]),
            tuple(map(str, record["layers"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        name = record.get("name", "?")
        raise ValueError(
            f"scores {name!r} in {folder} are damaged: {type(error).__name__}: {error}; score anew"
        ) from None


def _answer(fields: Mapping[str, Any], top: int | None) -> Answer:
    edges, counts = fields["histogram"]
    if len(edges) != len(counts) + 1 or not -math.inf < edges[0] < edges[-1] < math.inf:
        raise ValueError(f"a histogram of {len(counts)} counts between {len(edges)} edges")
    return Answer(
        str(fields["query"]),
        tuple(map(Shown.from_json, fields["shown"])),
        tuple(map(_found, fields["proponents"][:top])),
        tuple(map(_found, fields["opponents"][:top])),
        (tuple(map(float, edges)), tuple(map(int, counts))),
    )


def _found(fields: Mapping[str, Any]) -> Found:
    return Found(
        int(fields["example"]),
        str(fields["id"]),
        float(fields["score"]),
        Shown.from_json(fields["shown"]),
        tuple(map(float, fields["tokens"])),
        tuple(map(float, fields["layers"])),
    )
