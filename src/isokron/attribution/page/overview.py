"""The way into a page of many answers: a list of all queries, and examples of several of them."""

from collections.abc import Sequence
from html import escape

from isokron.attribution.page.cards import image, label, name
from isokron.attribution.page.entries import Entry, Place, Places
from isokron.attribution.page.section import brief, search_words
from isokron.attribution.page.tokens import snippet
from isokron.pages.numbers import signed


def overview(entries: Sequence[Entry]) -> str:
    """A link to every query, as images or lines; scripts add a filter above."""
    wall = all(len(e.answer.shown) == 1 and e.answer.shown[0].image is not None for e in entries)
    links = "".join(
        f'<li data-words="{escape(search_words(entry))}">{_link(entry, wall)}</li>'
        for entry in entries
    )
    hint = "words, label 3" if any(entry.labels for entry in entries) else "words"
    return (
        '<div class="tools" hidden><label>Filter <input type="search" id="filter" '
        f'placeholder="{hint}" autocomplete="off"></label>'
        '<output id="matches" for="filter"></output>'
        '<button type="button" data-open="1">Open all</button>'
        '<button type="button" data-open="">Close all</button></div>\n'
        f'<nav class="overview" aria-label="All queries">'
        f'<ol class="{"wall" if wall else "lines"}">{links}</ol></nav>'
    )


def _link(entry: Entry, wall: bool) -> str:
    shown, title = entry.answer.shown, escape(entry.title)
    if wall:
        picture = image(shown[0], entry.title, "thumb")
        under = escape(snippet(shown[0].label or entry.title, 12))
        return (
            f'<a href="#{entry.anchor}" title="{title}">{picture}'
            f'<span aria-hidden="true">{under}</span></a>'
        )
    picture = image(shown[0], "", "thumb") if len(shown) == 1 else ""
    chip = label(shown[0], set()) if len(shown) == 1 else ""
    return (
        f'<a href="#{entry.anchor}">{picture}<bdi>{title}</bdi></a>{chip} '
        f'<span class="brief">{escape(brief(entry))}</span>'
    )


def repeated(places: Places) -> str:
    """The examples that come up for several queries, the most frequent first, folded away."""
    often = {
        example: some
        for example, some in places.items()
        if len({place.entry.anchor for place in some}) > 1
    }
    if not often:
        return ""
    order = sorted(often, key=lambda example: (-len(often[example]), example))
    rows = "".join(_row(example, often[example]) for example in order)
    return (
        f'<details class="repeated"><summary>{len(often):,} training examples come up for several '
        "queries</summary>"
        f'<ul class="places">{rows}</ul></details>'
    )


def _row(example: int, some: Sequence[Place]) -> str:
    found = some[0].found
    links = " ".join(
        f'<a class="{"plus" if place.found.score >= 0 else "minus"}" href="#{place.anchor}">'
        f"{escape(snippet(place.entry.title, 30))} {signed(place.found.score)}</a>"
        for place in some
    )
    return (
        f'<li id="example.{example}">{image(found.shown, f"training example {found.id}", "thumb")}'
        f'<div><div class="name">{name(found)}{label(found.shown, set())}</div>'
        f"<p>{links}</p></div></li>"
    )
