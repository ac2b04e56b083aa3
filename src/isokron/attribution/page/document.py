"""What was found in a run, as one HTML page that needs nothing but itself."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from isokron.attribution.page.entries import Entry, entries_of, places_of
from isokron.attribution.page.overview import overview, repeated
from isokron.attribution.page.recorded import Recorded
from isokron.attribution.page.section import section
from isokron.pages.html import document, table, words

FOLDER = Path(__file__).parent
OPEN = 3  # answers that are unfolded where there are no more; of more, the first only
MODES = {
    "individual": "each query by itself",
    "mean": "by the mean gradient of all queries",
    "nearest": "by the largest score with any of the queries",
}
METHODS = {"kfac": "K-FAC", "ekfac": "EK-FAC", "tkfac": "TKFAC", "shampoo": "Shampoo"}


def page(record: Mapping[str, Any], groups: Sequence[Recorded]) -> str:
    """The whole page; every text of the user's is escaped."""
    entries = entries_of(groups)
    places = places_of(entries)
    title = f"Training examples that shaped {record['source']['task']}"
    parts = [
        '<a class="skip" href="#answers">Skip to the answers</a>',
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(lead(record, entries))}</p>',
        f'<p class="soft">{escape(meaning(record, groups))}</p>',
        f'<h2 id="queries">Queries</h2>\n{overview(entries)}' if len(entries) > 1 else "",
        repeated(places),
        '<div id="answers">',
    ]
    for group in groups:
        own = [entry for entry in entries if entry.group is group]
        parts.append(_heading(group, len(groups)))
        parts += [
            section(entry, places, len(entries) <= OPEN or entry is entries[0]) for entry in own
        ]
    parts += ["</div>", _settings(record, groups)]
    body = "\n".join(part for part in parts if part)
    return document(title, body, FOLDER / "attribution.css", FOLDER / "attribution.js")


def lead(record: Mapping[str, Any], entries: Sequence[Entry]) -> str:
    """What is to be seen, and what a score says, in one sentence."""
    queries = sum(len(entry.answer.shown) for entry in entries)
    sets = len({entry.group.name for entry in entries})
    source, several = record["source"], f" in {sets} sets" if sets > 1 else ""
    examples = _count(source["examples"], "training example", "training examples")
    return (
        f"For {_count(queries, 'query', 'queries')}{several} to a model of {source['task']}, "
        f"these of its {examples} matter most: "
        "training on a proponent lowers the loss of the query, on an opponent raises it."
    )


def meaning(record: Mapping[str, Any], groups: Sequence[Recorded]) -> str:
    """How scores were made, and what may be compared."""
    fitted = record["stages"].get("fit")
    product = "the cosine" if all(group.ask.unit for group in groups) else "the inner product"
    between = f"A score is {product} of the query's gradient and that of the example"
    if fitted:
        method = METHODS.get(str(fitted.get("method")), str(fitted.get("method")))
        between += f", with the inverse of the model's curvature ({method}) between them"
    return f"{between}. Compare scores of one query with each other, not across queries."


def _heading(group: Recorded, groups: int) -> str:
    if groups == 1:
        how = "" if group.ask.mode == "individual" else f": {MODES[group.ask.mode]}"
        return f"<h2>Answers{escape(how)}</h2>"
    how = MODES[group.ask.mode] + (", as cosines" if group.ask.unit else "")
    return f'<h2>Answers <bdi>{escape(group.name)}</bdi><span class="quiet">: {how}</span></h2>'


def _settings(record: Mapping[str, Any], groups: Sequence[Recorded]) -> str:
    """All that run.json says, folded away."""
    settings = {
        **record["source"],
        "layers": record["source"].get("layers") or "all",
        **record["stages"],
        **{f"scores {group.name}": asdict(group.ask) for group in groups},
        "isokron": record["isokron"],
        "torch": record["torch"],
    }
    command = settings.pop("command", None) or record.get("command")
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    again = f"<p>To do it again:</p><pre>{escape(str(command))}</pre>" if command else ""
    rows = [[key, words(_plain(value))] for key, value in settings.items()]
    return (
        f'<details class="settings"><summary>Settings</summary>{again}\n'
        f"{table(('setting', 'value'), rows, 'words')}\n</details>"
    )


def _plain(value: Any) -> Any:
    """JSON's words as a reader's."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else value


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
