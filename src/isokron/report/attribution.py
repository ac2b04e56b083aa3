"""The page of a run: every query with its most influential training examples."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isokron.files import write_atomically
from isokron.report.charts import Histogram, draw_histogram
from isokron.report.render import FOLDER, environment, percent, plural, render
from isokron.report.scores import REMEDY, read_scores

PAGE, INDEX = "report.html", "index.html"
GENERATOR = 'content="isokron report"'  # in the head of the templates
LAYERS = 12  # layers of a card that get a bar
LINES, COLUMNS = 14, 62  # a longer text is cut off and unfolds
SMALL = 96  # images up to this width show their pixels as squares
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode categories that leave no mark or break lines
ORDERS = ("per_token", "cosine")  # of cards, besides the share
MODES = {"mean": "Mean of {}", "nearest": "Nearest of {}"}

Json = dict[str, Any]


def write_report(folder: Path, out: Path | None = None, top: int | None = None) -> Path:
    """Write the page of all scores in a run, and return its path.

    It reads scores/*.json only, and the same files give the same bytes. With several sets of
    queries an index.html is written beside it.
    out: the page, by default report.html in the folder.
    top: at most so many proponents and opponents per query.
    """
    path = Path(folder) / PAGE if out is None else Path(out)
    index = path.with_name(INDEX)
    context = _context(read_scores(Path(folder), top))
    # an index.html that another command wrote is left alone
    free = not index.exists() or GENERATOR in index.read_text(encoding="utf-8", errors="replace")
    several = len(context["sets"]) > 1 and free and path != index
    context |= {"page": path.name, "index": INDEX if several else None}
    environment().filters["script_json"] = script_json
    files = FOLDER / "attribution.css", FOLDER / "attribution.js"
    for target, template in [(path, "attribution.html"), (index, "index.html")][: 1 + several]:
        html = render(template, *files, **context)
        # half of a surrogate pair, as a tokenizer may leave one, has no bytes in UTF-8
        write_atomically(target, [html.encode("utf-8", "replace")])
    return path


def _context(sets: Sequence[Json]) -> Json:
    """The variables of the templates."""
    places: dict[int, list[Json]] = defaultdict(list)
    panes: list[Json] = []
    for record in sets:
        # the id is part of links
        digest = hashlib.sha256(record["name"].encode("utf-8", "replace")).hexdigest()[:12]
        plain = re.fullmatch(r"[A-Za-z0-9_-]+", record["name"])
        record["id"] = f"set-{record['name'] if plain else digest}"
        record["panes"] = [_pane(record, k) for k in range(len(record["answers"]))]
        panes += record["panes"]
    cards = [card for pane in panes for card in pane["cards"]]
    for card in cards:
        places[card["example"]].append(card)
    for card in cards:
        card["others"] = len({place["pane_id"] for place in places[card["example"]]}) - 1
    repeated = [same for same in places.values() if same[0]["others"]]
    return {
        "title": f"Training examples that shaped {sets[0]['run']['model']}",
        "sets": sets,
        "panes": panes,
        "words": [[pane["words"], *(card["words"] for card in pane["cards"])] for pane in panes],
        "orders": [key for key in ORDERS if any(card[key] is not None for card in cards)],
        "repeated": sorted(repeated, key=lambda same: (-same[0]["others"], same[0]["example"])),
    }


def _pane(record: Json, k: int) -> Json:
    """One answer, as its template shows it. Shares are of the sum of its positive scores."""
    answer, mode = record["answers"][k], record["method"]["mode"]
    shown, unit = answer["shown"], answer["positive"] or None
    title = snippet(answer["query"]) or f"query {k + 1}"
    if mode in MODES:
        title = MODES[mode].format(plural(len(shown), "query", "queries"))
    pane = answer | {"id": f"{record['id']}.{k}", "title": title, "unit": unit}
    pane["labels"] = sorted({example["label"] for example in shown if example["label"]})
    # few examples may all have one sign: only negative scores are opponents
    sides = {
        "for": [item for item in answer["proponents"] if (item["score"] or 0.0) > 0],
        "against": [item for item in answer["opponents"] if (item["score"] or 0.0) < 0],
    }
    largest = max((abs(item["score"]) for items in sides.values() for item in items), default=1.0)
    pane["sides"] = {
        side: [_card(pane, side, item, largest, record["layers"]) for item in items]
        for side, items in sides.items()
    }
    pane["cards"] = pane["sides"]["for"] + pane["sides"]["against"]
    items = answer["proponents"] + answer["opponents"]
    pane["unscored"] = sum(item["score"] is None for item in items)
    pane["said"] = visible(answer["said"] or "")
    pane["error"] = _share(answer["standard_error"], unit)
    pane["chart"] = _histogram(pane) if answer["histogram"] else ""
    alone = len(shown) == 1
    # scores and losses by token belong to a query that was asked alone
    scores, losses = (answer["token_scores"], answer["token_losses"]) if alone else ([], [])
    total = sum(abs(score or 0.0) for score in scores)
    shares = [_share(score, total) for score in scores]
    pane["queries"] = [_text(example, shares, losses) for example in shown]
    # a short text may be its own title
    text = pane["queries"][0]["all"] if alone else ""
    pane["brief"] = "" if text == answer["query"] else snippet(text)
    labels = " ".join(f"label {label}" for label in pane["labels"])
    pane["words"] = f"{title} {labels} {' '.join(q['all'] for q in pane['queries'])}".lower()
    return pane


def _card(pane: Json, side: str, item: Json, largest: float, layers: Sequence[str]) -> Json:
    """One training example among the foremost of an answer."""
    shown, unit = item["shown"], pane["unit"]
    text = _text(shown, [_share(score, unit) for score in item["tokens"]])
    return item | {
        "name": item["id"],
        "id": f"{pane['id']}.{side}.{item['example']}",
        "pane_id": pane["id"],
        "pane_title": pane["title"],
        "share": _share(item["score"], unit) if item["share"] is None else item["share"],
        "per_token": _share(item["per_token"], unit),
        "width": 100 * abs(item["score"]) / largest,
        "text": text,
        "bars": _bars(layers, item["layers"], unit),
        "words": f"{item['id']} label {shown['label'] or ''} {text['all']}".lower(),
    }


def _bars(names: Sequence[str], scores: Sequence[float | None], unit: float | None) -> list[Json]:
    """The layers with the largest scores, and the sum of the others."""
    if len(names) != len(scores):
        return []
    pairs = [(name, score or 0.0) for name, score in zip(names, scores, strict=True)]
    pairs.sort(key=lambda pair: -abs(pair[1]))
    if others := pairs[LAYERS:]:
        name = f"the other {plural(len(others), 'layer')}"
        pairs[LAYERS:] = [(name, sum(score for _, score in others))]
    largest = max((abs(score) for _, score in pairs), default=0.0) or 1.0
    return [
        {"name": name, "share": _share(score, unit), "width": 100 * abs(score) / largest}
        for name, score in pairs
    ]


def _histogram(pane: Json) -> str:
    """All scores of a query as percentages, with the cards' marked below."""
    edges, counts = pane["histogram"]
    unit, total = pane["unit"], int(sum(counts))
    factor = 100 / unit if unit else 1.0
    shown = " and ".join(map(plural, map(len, pane["sides"].values()), ("proponent", "opponent")))
    marks = [[card["score"] * factor for card in cards] for cards in pane["sides"].values()]
    ends = " to ".join(percent(_share(edge, unit)) for edge in (edges[0], edges[-1]))
    chart = Histogram(
        f"{pane['id']}.scores",
        f"Scores of all {plural(total, 'training example')}",
        f"{plural(total, 'score')}, {ends}; {shown} are marked.",
        "share of the query's positive influence, %" if unit else "score",
        "examples",
        [edge * factor for edge in edges],
        [int(count) for count in counts],
        list(enumerate(marks, 1)),
    )
    return draw_histogram(chart)


def _text(shown: Json, shares: Sequence[float | None], losses: Sequence[float | None] = ()) -> Json:
    """What a reader sees of an example; the script cuts the text into tokens and colours them."""
    tokens = [visible(token) for token in shown["tokens"]]
    text, context = "".join(tokens), visible(shown["context"] or "")
    lines = sum(1 + len(line) // COLUMNS for line in (context + text).split("\n"))
    values = {"shares": shares, "losses": losses}
    data = {
        name: " ".join("?" if value is None else f"{value:.4g}" for value in numbers)
        for name, numbers in values.items()
        if len(numbers) == len(tokens) > 0
    }
    if data:
        # JavaScript counts UTF-16 units
        data["cuts"] = " ".join(str(len(t.encode("utf-16-le")) // 2) for t in tokens)
    title, image = visible(shown["title"] or ""), shown["image"] or ""
    try:
        # every PNG file has its width in bytes 16 to 19
        width = int.from_bytes(base64.b64decode(image[:32])[16:20], "big")
    except ValueError:
        raise ValueError(f"image must be a PNG file in base64, got {image:.40}; {REMEDY}") from None
    return {
        **{"text": text, "context": context, "title": title, "label": shown["label"], "data": data},
        **{"lines": lines if lines > LINES else 0, "all": f"{title} {context}{text}".strip()},
        **{"image": image, "pixels": width <= SMALL},
    }


def _share(value: float | None, unit: float | None) -> float | None:
    return None if value is None or not unit else value / unit


def snippet(text: str, limit: int = 90) -> str:
    """The beginning in one line."""
    line = visible(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def visible(text: str) -> str:
    """The text with control characters, direction marks and half characters as pictures."""
    if text.isprintable():
        return text
    return "".join(
        char
        # joiners are parts of emoji and of Persian or Indic words
        if char in "\n\t\u200c\u200d" or unicodedata.category(char) not in UNSEEN
        else (chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"⟨U+{ord(char):04X}⟩")
        for char in text
    )


def script_json(value: Any) -> str:
    """JSON that can stand in a <script> element: neither its end nor a comment can begin."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("</", "<\\/").replace("<!--", "\\u003c!--")
