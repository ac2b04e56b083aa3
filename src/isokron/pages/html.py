"""Parts of a page, as text: the document around them, figures, tables that scroll, lists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from isokron.pages.plot import CSS, Plot, draw

FOLDER = Path(__file__).parent
SHORT = 14  # characters of a name that stays on one line


def document(title: str, body: str, *more: Path) -> str:
    """A whole page around its body, with the style and script of all pages and those of `more`."""
    files = [CSS, FOLDER / "page.css", FOLDER / "page.js", *more]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    style = "".join(text for path, text in texts.items() if path.suffix == ".css")
    script = "".join(text for path, text in texts.items() if path.suffix == ".js")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def figure(plot: Plot, caption: str) -> str:
    """A plot whose curves can be read by pointing at them, unless marks say their own values."""
    curves = [
        {"label": line.label, "points": line.points}
        for line in plot.lines
        if not line.thin and line.points and not plot.marks
    ]
    data = escape(json.dumps(curves))
    log = ' data-log="x"' if plot.x_log and curves else ""
    return (
        f'<figure data-curves="{data}" data-axis="{escape(plot.x_label)}"{log}>\n'
        f"<h3>{escape(plot.title)}</h3>\n{draw(plot)}\n"
        f'<figcaption><span class="readout">{escape(caption)}</span></figcaption>\n</figure>'
    )


def framed(title: str, svg: str, caption: str) -> str:
    """A figure that only shows."""
    return (
        f"<figure>\n<h3>{escape(title)}</h3>\n{svg}\n"
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def plots(figures: Iterable[str]) -> str:
    """Figures side by side where there is room."""
    return '<div class="plots">\n' + "\n".join(figures) + "\n</div>"


def table(head: Sequence[str], cells: Iterable[Sequence[str]], kind: str = "") -> str:
    """Rows under a head, the first cell of each naming it.

    kind: "words" for running text, "names" where the first are dotted names.
    """
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{_dotted(row[0]) if kind == "names" else escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in cells
    )
    inside = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return scroll(head[0], inside, kind)


def sortable(
    label: str,
    head: Sequence[str],
    cells: Iterable[Sequence[str]],
    keys: Iterable[Sequence[float | str]],
) -> str:
    """A table of dotted names whose heads sort it, by the numbers or words behind the texts."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = []
    for row, by in zip(cells, keys, strict=True):
        marks = [f'data-key="{escape(str(key))}"' for key in by]
        rest = "".join(
            f"<td {mark}>{escape(cell)}</td>" for mark, cell in zip(marks[1:], row[1:], strict=True)
        )
        lines.append(f'<tr><th scope="row" {marks[0]}>{_dotted(row[0])}</th>{rest}</tr>')
    inside = f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return scroll(label, inside, "sortable names")


def scroll(label: str, inside: str, kind: str = "") -> str:
    """A table that scrolls in its own box, by keyboard too."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f'<table class="{kind}">{inside}</table></div>'
    )


def _dotted(name: str) -> str:
    """A name that may break after its dots and underscores, if it is long."""
    text = escape(name)
    return text if len(name) <= SHORT else text.replace(".", ".<wbr>").replace("_", "_<wbr>")


def bullets(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def settings_table(settings: Mapping[str, Any]) -> str:
    """All settings, folded away."""
    rows = [[key, words(value)] for key, value in settings.items()]
    return (
        "<details><summary>Settings</summary>\n"
        f"{table(('setting', 'value'), rows, 'words')}\n</details>"
    )


def words(value: Any) -> str:
    """A setting as a reader would write it."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(words, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
