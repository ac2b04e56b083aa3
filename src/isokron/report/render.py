"""Self-contained HTML pages from templates, and number formats."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from isokron.files import write_atomically

FOLDER = Path(__file__).parent
MISSING = "–"  # for numbers that are missing or not finite
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode categories of invisible characters
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@cache
def environment() -> Any:
    """The templates, with autoescape; charts and number formats are filters."""
    # imported here, since code that prints tables needs the number formats only
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # imported here, since charts.py uses these templates
    from isokron.report.charts import COLOURS, draw, draw_dots

    templates = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (number, percent, plural, memory, words, draw, draw_dots):
        templates.filters[function.__name__] = function
    templates.globals |= {"source": source, "COLOURS": COLOURS}
    # shorter than \u escapes
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return templates


def source(name: str) -> str:
    """A style sheet or script of this package."""
    return (FOLDER / name).read_text(encoding="utf-8")


def render(template: str, **context: Any) -> str:
    """A page from a template and its variables, with all styles and scripts inside."""
    return str(environment().get_template(template).render(**context))


def add_link_(page: Path, text: str, target: str) -> None:
    """Link a written page to another one, at its top; it may have the link already."""
    head, main, body = page.read_text(encoding="utf-8").partition("<main>\n")
    link = f'<p class="pages"><a href="{escape(target)}">{escape(text)}</a></p>\n'
    if not body.startswith(link):
        write_atomically(page, [(head + main + link + body).encode()])


def words(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(words, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def memory(size: int) -> str:
    """Bytes in the largest unit in which the number is at least one."""
    exponent = min(3, int(math.log(size, 1024))) if size else 0
    unit = ("B", "KiB", "MiB", "GiB")[exponent]
    return f"{size / 1024**exponent:.{0 if exponent == 0 else 1}f} {unit}"


def finite(value: Any) -> Any:
    """The value for JSON, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def health_row(optimizer: str, statistics: Sequence[Mapping[str, Any]]) -> list[str]:
    """`optimizer.statistics()` as cells: of the group with the most state, the matrices."""
    values = max(statistics, key=lambda group: group["state_bytes"])
    numbers = ("update_rms", "adam_cosine", "condition_median", "condition_max")
    texts = [MISSING if values[key] is None else f"{values[key]:.3g}" for key in numbers]
    failed = f"{values['failed_share']:.0%} of {values['refreshes']:,}"
    return [optimizer, *texts, failed if values["refreshes"] else MISSING]


def number(value: float | None, plus: bool = False) -> str:
    """Three digits: 0.0123, −128,714, 1.20 × 10⁻⁷; a dash if it is not finite.

    plus: whether positive numbers have a sign.
    """
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
    return _sign(value, plus) + text


def percent(share: float | None, plus: bool = True) -> str:
    """A fraction in percent: +12.3 %, −0.041 %, <0.001 %."""
    if share is None or not math.isfinite(share):
        return MISSING
    size = abs(100 * share)
    text = "<0.001" if 0 < size < 1e-3 else number(float(f"{size:.3f}"))
    if size < 0.1 and "." in text:
        # 0.041 and not 0.0410: at most three decimals
        text = text.rstrip("0").rstrip(".")
    return f"{_sign(share, plus)}{text}\u00a0%"


def _sign(value: float, plus: bool) -> str:
    return "−" if value < 0 else "+" if value > 0 and plus else ""


def plural(value: int, singular: str, plural_form: str = "") -> str:
    """A count with its noun: 1 query, 12 queries."""
    return f"{value:,} {singular if value == 1 else plural_form or singular + 's'}"


def visible(text: str) -> str:
    """The text with invisible characters, such as controls and direction marks, made visible."""
    if text.isprintable():
        return text
    return "".join(
        char
        # joiners belong to emoji and to Persian or Indic words
        if char in "\n\t\u200c\u200d" or unicodedata.category(char) not in UNSEEN
        else (chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"⟨U+{ord(char):04X}⟩")
        for char in text
    )
