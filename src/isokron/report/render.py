"""HTML of self-contained pages: the jinja2 environment, number formats, and parts of a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from isokron.report.charts import CSS, Plot, draw

FOLDER = Path(__file__).parent
Cells = Iterable[Sequence[str]]
SHORT = 14  # characters of a name that stays on one line
MISSING = "–"  # stands for a number that is absent or not finite
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@cache
def environment() -> Any:
    """The templates of this package, with autoescape and the number formats as filters."""
    # number formats are imported by code that prints tables, which should not wait for jinja2
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(FOLDER / "templates")
    templates = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    templates.trim_blocks = templates.lstrip_blocks = True
    formats = (number, signed, percent, plural, dotted, words)
    templates.filters.update({function.__name__: function for function in formats})
    return templates


def render(template: str, *files: Path, **context: Any) -> str:
    """A page from a template that extends page.html, with all styles and scripts inside.

    files: .css and .js besides those of every page. context: the template's variables and `title`.
    """
    paths = [CSS, FOLDER / "page.css", FOLDER / "page.js", *files]
    texts = [(path.suffix, path.read_text(encoding="utf-8")) for path in paths]
    style = "".join(text for suffix, text in texts if suffix == ".css")
    script = "".join(text for suffix, text in texts if suffix == ".js")
    page = environment().get_template(template)
    return page.render(style=style, script=script, **context)


def document(title: str, body: str, *files: Path) -> str:
    """A page around a body of HTML."""
    return render("page.html", *files, title=title, body=body)


def figure(plot: Plot, caption: str) -> str:
    """A line plot whose curves are read out below it by pointing, unless it has marks."""
    curves = [
        {"label": line.label, "points": line.points}
        for line in plot.lines
        if not line.thin and line.points and not plot.marks
    ]
    axis = (plot.x_label, plot.x_log and bool(curves))
    return _part("figure", plot.title, draw(plot), caption, json.dumps(curves), *axis)


def framed(title: str, svg: str, caption: str) -> str:
    """A figure that does not react to the pointer."""
    return _part("framed", title, svg, caption)


def plots(figures: Iterable[str]) -> str:
    """Figures side by side where there is room."""
    return '<div class="plots">\n' + "\n".join(figures) + "\n</div>"


def table(head: Sequence[str], cells: Cells, kind: str = "") -> str:
    """Rows under a head, the first cell of each naming it.

    kind: "words" for running text, "names" where the first cells are dotted names.
    """
    return _part("table", head, list(cells), kind)


def sortable(
    label: str, head: Sequence[str], cells: Cells, keys: Iterable[Sequence[float | str]]
) -> str:
    """A table of dotted names whose heads sort it, by the numbers or words behind the texts."""
    rows = [list(zip(row, by, strict=True)) for row, by in zip(cells, keys, strict=True)]
    return _part("sortable", label, head, rows)


def scroll(label: str, inside: str, kind: str = "") -> str:
    """A table that scrolls in its own box, by keyboard too. inside: HTML of its rows."""
    return _part("scroll", label, inside, kind)


def bullets(lines: Iterable[str]) -> str:
    """A list of sentences."""
    return _part("bullets", list(lines))


def settings_table(settings: Mapping[str, Any]) -> str:
    """All settings, folded away."""
    return _part("settings", settings)


def _part(name: str, *arguments: Any) -> str:
    """The HTML of a macro in parts.html.

    A plain string: pages that are put together by `+` would escape the neighbours of a Markup.
    """
    return str(getattr(environment().get_template("parts.html").module, name)(*arguments))


def words(value: Any) -> str:
    """A setting as a reader would write it."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(words, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def dotted(name: str) -> str:
    """A name that may break after its dots and underscores, if it is long."""
    from markupsafe import Markup, escape

    text = escape(name)
    if len(name) > SHORT:
        text = text.replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>"))
    return text


def memory(size: int) -> str:
    """Bytes in the largest unit that leaves a number above one."""
    exponent = min(3, int(math.log(size, 1024))) if size else 0
    unit = ("B", "KiB", "MiB", "GiB")[exponent]
    return f"{size / 1024**exponent:.{0 if exponent == 0 else 1}f} {unit}"


def finite(value: Any) -> Any:
    """The value for JSON, which has no infinity: null in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None) -> str:
    """Three digits: 0.0123, −128,714, 1.20 × 10⁻⁷; a dash where there is no finite number."""
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        digits, _, exponent = f"{size:.2e}".partition("e")
        text = f"{digits} × 10{str(int(exponent)).translate(SUPERSCRIPT)}"
    elif size >= 100:
        text = f"{size:,.0f}"
    else:
        text = f"{size:#.3g}".removesuffix(".") if size else "0"
    return f"−{text}" if value < 0 else text


def signed(value: float | None) -> str:
    """A number with its sign also where it is positive."""
    text = number(value)
    return f"+{text}" if text != MISSING and value is not None and value > 0 else text


def percent(share: float | None, sign: bool = True) -> str:
    """A share of 1 in percent: +12.3 %, −0.041 %; below 0.001 % only that it is below."""
    if share is None or not math.isfinite(share):
        return MISSING
    size = abs(100 * share)
    if 0 < size < 1e-3:
        text = "<0.001"
    else:
        text = number(float(f"{size:.3f}"))  # 0.041 and not 0.0410: at most three decimals
        text = text.rstrip("0").rstrip(".") if size < 0.1 and "." in text else text
    prefix = "−" if share < 0 else "+" if share > 0 and sign else ""
    return f"{prefix}{text}\u00a0%"


def plural(value: int, one: str, many: str = "") -> str:
    """A count with its noun: 1 query, 12 queries."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"
