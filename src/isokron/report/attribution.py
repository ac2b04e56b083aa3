"""The HTML page of a run: every query with its most influential training examples."""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isokron.files import write_atomically
from isokron.report.charts import Chart, draw_histogram
from isokron.report.render import percent, plural, render, visible

FORMAT, VERSION = "isokron scores", 3  # of scores/*.json
LATEST = "latest"  # in scores/: the name of the last ones
LAYERS = 12  # layers with a bar on a card
LINES, COLUMNS = 14, 62  # longer texts are folded
SMALL = 96  # images up to this width are shown with sharp pixels
MODES = {"mean": "Mean of {}", "nearest": "Nearest of {}"}

Json = dict[str, Any]


def write_report(folder: Path, page: Path | None = None, *, all: bool = False) -> Path:
    """Write the page of the last scores of a run, by default report.html in its folder; its path.

    It depends on files in scores/ only, and the same files give the same bytes. all: of all scores.
    """
    paths = sorted((folder / "scores").glob("*.json"))
    if not paths:
        raise FileNotFoundError(
            f"no scores in {str(folder)!r}; score some queries first with `isokron score`"
        )
    latest = folder / "scores" / LATEST
    last = [folder / "scores" / f"{latest.read_text()}.json"] if latest.exists() else []
    chosen = last if last and not all and last[0] in paths else paths
    sets, others = [_read(path) for path in chosen], len(paths) - len(chosen)
    panes = [pane for record in sets for pane in record["panes"]]
    repeated = _repeated(panes)
    html = render("attribution.html", sets=sets, panes=panes, repeated=repeated, others=others)
    page = page or folder / "report.html"
    # half of a surrogate pair, which a tokenizer may produce, cannot be encoded in UTF-8
    write_atomically(page, [html.encode("utf-8", "replace")])
    return page


def _read(path: Path) -> Json:
    """The scores of one set of queries, with a pane for every query."""
    try:
        record: Json = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_visible)
        if (record["format"], record["version"]) != (FORMAT, VERSION):
            raise ValueError(f"got {record['format']!r}, version {record['version']!r}")
        # ids are parts of links, where other characters would have to be encoded
        safe = re.sub("[^A-Za-z0-9-]", lambda match: f"_{ord(match[0]):x}_", record["name"])
        record["id"] = f"set-{safe}"
        record["panes"] = [_pane(record, k) for k in range(len(record["answers"]))]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged, or not {FORMAT!r} of version {VERSION} "
            f"({type(error).__name__}: {error}); score the queries again with `isokron score`"
        ) from error
    return record


def _visible(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object in which no text has invisible characters."""

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [visible(part) if isinstance(part, str) else part for part in value]
        return visible(value) if isinstance(value, str) else value

    return {visible(key): shown(value) for key, value in pairs}


def _repeated(panes: Sequence[Json]) -> list[list[Json]]:
    """Cards of training examples that occur for several queries, most frequent first."""
    by_example: dict[int, list[Json]] = defaultdict(list)
    for card in (card for pane in panes for card in pane["cards"]):
        by_example[card["example"]].append(card)
        card["places"] = by_example[card["example"]]
    repeated = [cards for cards in by_example.values() if len(cards) > 1]
    return sorted(repeated, key=lambda cards: (-len(cards), cards[0]["example"]))


def _pane(record: Json, k: int) -> Json:
    """One query as its template shows it. Shares are of the sum of its positive scores."""
    answer, mode = record["answers"][k], record["method"]["mode"]
    shown, unit = answer["shown"], answer["positive"]
    title = answer["query"] or f"query {k + 1}"
    if mode in MODES:
        title = MODES[mode].format(plural(len(shown), "query", "queries"))
    pane = answer | {"id": f"{record['id']}.{k}", "title": title}
    sides = {"for": answer["proponents"], "against": answer["opponents"]}
    pane["sides"] = {
        side: [_card(pane, side, item, record["layers"]) for item in items]
        for side, items in sides.items()
    }
    pane["cards"] = pane["sides"]["for"] + pane["sides"]["against"]
    pane["largest"] = max((abs(card["score"]) for card in pane["cards"]), default=1.0)
    pane["said"] = answer["said"] or ""
    pane["error"] = _share(answer["standard_error"], unit)
    pane["chart"] = _histogram(pane)
    # only a single query has scores and losses by token
    single = len(shown) == 1
    scores, losses = (answer["token_scores"], answer["token_losses"]) if single else ([], [])
    total = sum(map(abs, scores))
    shares = [_share(score, total) for score in scores]
    pane["queries"] = [_text(example, shares, losses) for example in shown]
    words = " ".join([title.lower(), *(text["words"] for text in pane["queries"])])
    pane["words"] = [words, *(card["words"] for card in pane["cards"])]
    return pane


def _card(pane: Json, side: str, item: Json, layers: Sequence[str]) -> Json:
    """One of the top training examples of a query."""
    unit = pane["positive"]
    text = _text(item["shown"], [_share(score, unit) for score in item["tokens"]])
    return item | {
        "name": item["id"],
        "id": f"{pane['id']}.{side}.{item['example']}",
        "pane_title": pane["title"],
        "per_token": _share(item["per_token"], unit),
        "text": text,
        "bars": _bars(layers, item["layers"], unit) if item["layers"] else [],
        "words": f"{item['id'].lower()} {text['words']}",
    }


def _bars(names: Sequence[str], scores: Sequence[float], unit: float) -> list[Json]:
    """The layers with the largest scores, and the sum of the others."""
    pairs = sorted(zip(names, scores, strict=True), key=lambda pair: -abs(pair[1]))
    if others := pairs[LAYERS:]:
        name = f"the other {plural(len(others), 'layer')}"
        pairs[LAYERS:] = [(name, sum(score for _, score in others))]
    largest = max(abs(score) for _, score in pairs) or 1.0
    return [
        {"name": name, "share": _share(score, unit), "width": 100 * abs(score) / largest}
        for name, score in pairs
    ]


def _histogram(pane: Json) -> str:
    """A histogram of all scores of a query in percent; those on cards are marked."""
    edges, counts = pane["histogram"]
    unit, total = pane["positive"], sum(counts)
    factor = 100 / unit if unit else 1.0
    marked = " and ".join(map(plural, map(len, pane["sides"].values()), ("proponent", "opponent")))
    ends = " to ".join(percent(_share(edge, unit)) for edge in (edges[0], edges[-1]))
    chart = Chart(
        f"{pane['id']}.scores",
        f"Scores of all {plural(total, 'training example')}",
        f"{plural(total, 'score')}, {ends}; {marked} are marked.",
        "share of the query's positive influence, %" if unit else "score",
    )
    marks = [[card["score"] * factor for card in cards] for cards in pane["sides"].values()]
    return draw_histogram(chart, [edge * factor for edge in edges], counts, marks)


def _text(shown: Json, shares: Sequence[float | None], losses: Sequence[float] = ()) -> Json:
    """The text of an example; a script splits it into tokens and colours them."""
    tokens = shown.get("tokens", ())
    text, context = "".join(tokens), shown.get("context", "")
    lines = sum(1 + len(line) // COLUMNS for line in (context + text).split("\n"))
    data = {
        name: " ".join("?" if value is None else f"{value:.4g}" for value in numbers)
        for name, numbers in (("shares", shares), ("losses", losses))
        if len(numbers) == len(tokens) > 0
    }
    if data:
        # JavaScript counts UTF-16 units
        data["cuts"] = " ".join(str(len(token.encode("utf-16-le")) // 2) for token in tokens)
    title, label = shown.get("title", ""), shown.get("label", "")
    full, image = f"{title} {context}{text}".strip(), shown.get("image", "")
    return {
        "text": text,
        "context": context,
        "title": title,
        "label": label,
        "data": data,
        "lines": lines if lines > LINES else 0,
        "all": full,
        "words": f"label {label} {full}".lower(),
        "image": image,
        # every PNG file has its width in bytes 16 to 19
        "pixels": int.from_bytes(base64.b64decode(image[:32])[16:20], "big") <= SMALL,
    }


def _share(value: float | None, unit: float) -> float | None:
    return None if value is None or not unit else value / unit
