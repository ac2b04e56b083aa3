"""One answer: the query, how all scores are spread, and the examples for and against it."""

import math
from html import escape

from isokron.attribution.answers import Found
from isokron.attribution.page.cards import Measure, card, image, label
from isokron.attribution.page.entries import SIDES, Entry, Places
from isokron.attribution.page.tokens import LEVELS, plain_text, snippet
from isokron.pages.histogram import Histogram, draw_histogram
from isokron.pages.numbers import signed
from isokron.tasks import Shown


def section(entry: Entry, places: Places, opened: bool) -> str:
    """Folded but for its head; a link to anything inside opens it."""
    answer, measure = entry.answer, Measure.of(entry.found)
    galleries = "".join(
        _gallery(entry, side, some, measure, places)
        for side, some in zip(SIDES, (answer.proponents, answer.opponents), strict=True)
    )
    return (
        f'<details class="query" data-words="{escape(search_words(entry))}"'
        f"{' open' if opened else ''}>\n<summary>{_head(entry)}</summary>\n"
        f'<div class="answer" id="{entry.anchor}">\n<div class="asked">{_asked(entry)}'
        f"{_spread(entry)}</div>\n{_legend(measure.token)}"
        f'<div class="sides">{galleries}</div>\n</div>\n</details>'
    )


def search_words(entry: Entry) -> str:
    """What the filter looks in: names, labels and the beginning of texts, in small letters."""
    shown = entry.answer.shown[:20]
    parts = [entry.title, *(f"label {each.label}" for each in shown if each.label)]
    parts += [snippet(f"{each.title} {each.text}", 300) for each in shown]
    return " ".join(part for part in parts if part.strip()).lower()


def brief(entry: Entry) -> str:
    """A query in one line of text; empty where it is an image, or several."""
    shown = entry.answer.shown
    if len(shown) != 1 or shown[0].text == entry.title:  # a text may be its own title
        return ""
    return snippet(shown[0].text or shown[0].title)


def _head(entry: Entry) -> str:
    shown, found = entry.answer.shown, entry.found
    single = shown[0] if len(shown) == 1 else Shown()
    scores = [each.score for each in found]
    ends = f"{signed(max(scores))} … {signed(min(scores))}" if scores else ""
    return (
        f"{image(single, '', 'thumb')}<h3><bdi>{escape(entry.title)}</bdi></h3>"
        f'{label(single, set())}<span class="brief">{escape(brief(entry))}</span>'
        f'<span class="ends" title="largest and smallest score">{ends}</span>'
    )


def _asked(entry: Entry) -> str:
    shown = entry.answer.shown
    if len(shown) == 1:
        return f'<div class="one"><h4>Query</h4>{_whole(shown[0])}</div>'
    items = "".join(f"<li>{_whole(each)}</li>" for each in shown)
    kind = "wall" if all(each.image is not None and not each.text for each in shown) else "rows"
    names = escape(snippet(entry.answer.query, 300))
    return (
        f'<div class="one"><h4>{len(shown):,} queries, asked together</h4>'
        f'<p class="soft names">{names}</p>'
        '<div class="together" role="region" tabindex="0" aria-label="Queries asked together">'
        f'<ul class="{kind}">{items}</ul></div></div>'
    )


def _whole(shown: Shown) -> str:
    title = f'<bdi class="title">{escape(shown.title)}</bdi>' if shown.title else ""
    named = f"{title}{label(shown, set())}"
    name = f'<div class="name">{named}</div>' if named else ""
    return f"{image(shown, 'query')}{name}{plain_text(shown)}"


def _spread(entry: Entry) -> str:
    edges, counts = entry.answer.histogram
    sides = (entry.answer.proponents, entry.answer.opponents)
    low, high, total = signed(edges[0]), signed(edges[-1]), sum(counts)
    number = " and ".join(
        f"{len(some)} {name}" for name, some in zip(("proponents", "opponents"), sides, strict=True)
    )
    plot = Histogram(
        name=f"{entry.anchor}.spread",
        title=f"Scores of all {total:,} training examples",
        description=f"{total:,} scores from {low} to {high}; {number} are marked.",
        x_label="score",
        y_label="examples",
        edges=edges,
        counts=counts,
        marks=[
            (k, [each.score for each in some if math.isfinite(each.score)])
            for k, some in enumerate(sides, 1)
        ],
    )
    return (
        f"<figure><h4>{plot.title}</h4>\n{draw_histogram(plot)}\n"
        f"<figcaption>Heights are logarithmic. Ticks: the {number} shown below.</figcaption>"
        "</figure>"
    )


def _legend(scale: float) -> str:
    if not scale:
        return ""
    steps = (
        [f"n{k}" for k in range(LEVELS, 0, -1)] + ["p0"] + [f"p{k}" for k in range(1, LEVELS + 1)]
    )
    swatches = "".join(f'<i class="{step}"></i>' for step in steps)
    return (
        f'<p class="legend"><span>Tokens by their share of the score:</span> '
        f'<span class="ramp">{signed(-scale)} <span class="swatches" aria-hidden="true">{swatches}'
        f'</span> {signed(scale)}</span> <span class="hint">and beyond. Point at a token, tap it '
        "or use arrow keys to read its score.</span></p>\n"
    )


def _gallery(
    entry: Entry, side: str, some: tuple[Found, ...], measure: Measure, places: Places
) -> str:
    name, does = {
        "for": ("Proponents", "training on them lowers the loss of the query"),
        "against": ("Opponents", "training on them raises the loss of the query"),
    }[side]
    wrong = sum(each.score < 0 if side == "for" else each.score > 0 for each in some)
    note = ""
    if wrong:
        sign = "negative" if side == "for" else "positive"
        note = (
            f'<p class="soft">{wrong} of these have {sign} scores: there are no more '
            f"{name.lower()}.</p>"
        )
    tiles = all(each.shown.image is not None and not each.shown.text for each in some)
    cards = "".join(
        card(entry, side, rank, each, measure, places) for rank, each in enumerate(some, 1)
    )
    return (
        f'<section class="side {side}"><h4>{name}</h4><p class="soft">{does}</p>{note}\n'
        f'<ol class="cards {"tiles" if tiles else "texts"}">{cards}</ol></section>'
    )
