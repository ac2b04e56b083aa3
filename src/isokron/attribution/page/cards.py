"""One training example among the foremost of an answer, as an item of a list."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from isokron.attribution.answers import Found
from isokron.attribution.page.entries import Entry, Places, place_anchor
from isokron.attribution.page.tokens import scale_of, scored_text
from isokron.pages.numbers import signed
from isokron.tasks import Shown

FEW = 6  # other places that are linked from a card; more are linked from the list of examples
SMALL = 96  # pixels of an image's width up to which each is drawn as a square, and not blurred


@dataclass(frozen=True, eq=False)
class Measure:
    """What all cards of an answer are measured by: the largest score, and the deepest colour."""

    score: float
    token: float

    @staticmethod
    def of(found: Sequence[Found]) -> "Measure":
        return Measure(_largest(each.score for each in found), scale_of(found))


def card(entry: Entry, side: str, rank: int, found: Found, measure: Measure, places: Places) -> str:
    """Rank, score, name and label; text or image; layers; where else the example comes up."""
    shown = found.shown
    words, score = f"tokens of training example {found.id}", found.score
    return (
        f'<li class="card" id="{place_anchor(entry, side, found)}">'
        f'<div class="head"><span class="rank">{rank}</span>'
        f'<span class="score {_sign(score)}" title="{score!r}">{signed(score)}</span>'
        f"{bar(score, measure.score)}</div>"
        f"{image(shown, f'training example {found.id}')}"
        f'<div class="name">{name(found)}{label(shown, entry.labels)}</div>'
        f"{scored_text(shown, found.tokens, measure.token, words)}"
        f"{_layers(entry.group.layers, found.layers)}{_others(entry, found, places)}</li>"
    )


def image(shown: Shown, words: str, kind: str = "") -> str:
    """The image, if there is one; without words it is an ornament of what stands beside it."""
    file = shown.png()
    if file is None:
        return ""
    text = f"{words}, label {shown.label}" if words and shown.label else words
    width = int.from_bytes(file[16:20], "big")  # where every PNG file has it
    sharp = "pixels " if width <= SMALL else ""
    return (
        f'<img class="{sharp}{kind}" src="{shown.image_uri()}" alt="{escape(text)}" loading="lazy">'
    )


def label(shown: Shown, wanted: set[str]) -> str:
    """The label, marked where the query has another."""
    if not shown.label:
        return ""
    own = escape(shown.label)
    if not wanted or shown.label in wanted:
        return f'<span class="chip"><span class="quiet">label</span> <bdi>{own}</bdi></span>'
    theirs = escape("query: " + ", ".join(sorted(wanted)))
    return (
        f'<span class="chip other" title="{theirs}"><span class="quiet">label </span>'
        f'<bdi>{own}</bdi><span class="unlike"> ≠ query</span></span>'
    )


def bar(score: float, largest: float) -> str:
    """Its share of the largest score."""
    share = abs(score) / largest if largest and math.isfinite(score) else 0.0
    return (
        f'<span class="bar {_sign(score)}" aria-hidden="true">'
        f'<i style="width:{100 * share:.1f}%"></i></span>'
    )


def name(found: Found) -> str:
    """Its title, if it has one, and its id."""
    title, own = found.shown.title, escape(found.id)
    if not title or title == found.id:
        return f'<bdi class="id">#{own}</bdi>' if own.isdigit() else f'<bdi class="id">{own}</bdi>'
    return f'<bdi class="title">{escape(title)}</bdi> <bdi class="id">{own}</bdi>'


def _layers(names: Sequence[str], scores: Sequence[float]) -> str:
    if not scores or len(scores) != len(names):
        return ""
    largest = _largest(scores)
    rows = "".join(
        f'<li><span class="layer">{escape(layer)}</span>{bar(score, largest)}'
        f'<span class="score {_sign(score)}">{signed(score)}</span></li>'
        for layer, score in zip(names, scores, strict=True)
    )
    return (
        f'<details class="fold"><summary>by layer</summary><ul class="layers">{rows}</ul></details>'
    )


def _others(entry: Entry, found: Found, places: Places) -> str:
    """Links to the same example elsewhere; to the list of examples where they are many."""
    others = [place for place in places[found.example] if place.entry is not entry]
    if not others:
        return ""
    queries = len({place.entry.anchor for place in others})
    number = f"also for {queries} other {'queries' if queries > 1 else 'query'}"
    if len(others) > FEW:
        return f'<p class="also"><a href="#example.{found.example}">{number}</a></p>'
    links = [
        f'<a href="#{place.anchor}">{escape(place.entry.title)}</a> '
        f'<span class="score {_sign(place.found.score)}">{signed(place.found.score)}</span>'
        for place in others
    ]
    if len(links) == 1:
        return f'<p class="also">also for {links[0]}</p>'
    items = "".join(f"<li>{link}</li>" for link in links)
    return (
        f'<details class="fold"><summary>{number}</summary><ul class="also">{items}</ul></details>'
    )


def _sign(score: float) -> str:
    return "minus" if score < 0 else "plus"


def _largest(scores: Iterable[float]) -> float:
    return max((abs(s) for s in scores if math.isfinite(s)), default=0.0)
