"""Figures in the documentation, and the records they come from.

    python benchmarks/figures.py [README.md docs/katie.md]

prints every decimal number of these pages (default: README.md and docs/*.md) that no record has;
tests/test_figures.py requires that there is none. Hidden comments in a page name the records. They
hold until the next heading, and `figures` and `claims` also until the next of their kind:

    <!-- figures: katie recorded.start -->      every number of a table row, or of a line of printed
                                                output, must be in one row of these sources; a
                                                number in a sentence may be in any row
    <!-- claims: long_races memory -->          numbers of a table too may be in any row
    <!-- derived: 0.16 = 1.437 - 1.275; 3.9 = 2.83 / 0.73 -->   computed from numbers of the sources
    <!-- settings: 0.003 0.9 -->                chosen, defined or cited, not measured here

A source is docs/benchmarks/NAME.json, whose rows are the lines of `tables()` in benchmarks/NAME.py
where there is such a function, else its runs; or `recorded.NAME`, an entry of recorded.json: output
that a script printed on a machine that is no longer there. A number agrees with a row at the digits
that the page has. Code, links, versions, arXiv numbers and indented formulas are not looked at.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs" / "benchmarks"
NUMBER = re.compile(r"(?<![\w.^])(?<!\w-)(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\.?\w)")
MARKER = re.compile(r"<!--\s*(figures|claims|derived|settings):(.*?)-->", re.DOTALL)
VERSION = re.compile(r"\b(?:Python|PyTorch|torch|Triton|CUDA|jax) \d+\.\d+((, | and | or )\d+\.\d+)*")
NOT_FIGURES = re.compile(
    r"``?[^`\n]+``?"  # code
    r"|(?<=\])\([^)\n]*\)"  # targets of links
    r"|\b\d{4}\.\d{4,5}\b"  # arXiv
    r"|^ {4}\S.*$|" + VERSION.pattern,
    re.MULTILINE,
)
Rows = Sequence[Sequence[float]]


@dataclass
class Line:
    """One line of a page, and what its numbers are checked against."""

    page: str
    number: int
    text: str
    sources: tuple[str, ...] = ()
    by_row: bool = False
    settings: frozenset[str] = frozenset()
    derived: Mapping[str, str] = field(default_factory=dict)

    def figures(self) -> list[re.Match[str]]:
        """Decimal numbers and, where one row must have all of them, whole numbers too."""
        return [match for match in NUMBER.finditer(self.text) if self.by_row or "." in match[0]]


def lines_of(page: str, text: str) -> Iterator[Line]:
    """The lines of a page that have figures, without code, links and markers."""
    text = re.sub(r"^```(?!text)\w.*?^```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    markers = {text.count("\n", 0, match.start()): match for match in MARKER.finditer(text)}
    text = NOT_FIGURES.sub(_blank, MARKER.sub(_blank, text))
    line = Line(page, 0, "")
    fenced, claims = False, False
    for number, content in enumerate(text.split("\n")):
        if content.startswith("```"):
            fenced = not fenced
        if content.startswith("#") and not fenced:
            line = Line(page, 0, "")
        if (marker := markers.get(number)) is not None:
            kind, body = marker.groups()
            if kind == "settings":
                line.settings |= set(body.split())
            elif kind == "derived":
                pairs = (pair.split("=") for pair in body.split(";") if pair.strip())
                line.derived = {**line.derived, **{k.strip(): v.strip() for k, v in pairs}}
            else:
                line.sources, claims = tuple(body.split()), kind == "claims"
        by_row = (fenced or content.startswith("|")) and bool(line.sources) and not claims
        shown = Line(
            page, number + 1, content, line.sources, by_row, line.settings, line.derived
        )
        if shown.figures() and not re.fullmatch(r"[|\-\s]*", content):
            yield shown


def _blank(match: re.Match[str]) -> str:
    """As many lines, and as many characters on one line, without content."""
    return re.sub(r"[^\n]", " ", match[0])


def has(row: Sequence[float], stated: str) -> bool:
    """Whether a row has this number at the digits that are written."""
    value, digits = float(stated.replace(",", "")), len(stated.partition(".")[2])
    return any(abs(number - value) <= 0.5 * 10**-digits * (1 + 1e-9) for number in row)


def missing(line: Line, sources: Mapping[str, Rows]) -> list[str]:
    """The numbers of a line that no source has."""
    rows = [row for source in line.sources for row in sources.get(source, ())]
    numbers = [match[0] for match in line.figures() if match[0] not in line.settings]
    everywhere = [number for row in rows for number in row]
    numbers = [n for n in numbers if n not in line.derived or not _follows(n, line, everywhere)]
    if not line.by_row:
        return [number for number in numbers if not has(everywhere, number)]
    lacking = ([number for number in numbers if not has(row, number)] for row in rows)
    return min(lacking, key=len, default=numbers)


def _follows(stated: str, line: Line, everywhere: Sequence[float]) -> bool:
    """Whether the expression of a `derived` marker has this value, of operands in the sources."""
    expression = line.derived[stated]
    if not re.fullmatch(r"[\d.\s()+*/-]+", expression):
        return False
    operands = re.findall(r"\d+\.\d+", expression)
    value = abs(eval(expression))  # digits and operators alone, by the line above
    return has([value], stated) and all(has(everywhere, operand) for operand in operands)


def complaints(page: str, text: str, sources: Mapping[str, Rows]) -> list[str]:
    """What is wrong with the figures of a page, one sentence a line."""
    result = []
    for line in lines_of(page, text):
        unknown = [source for source in line.sources if source not in sources]
        numbers = missing(line, sources)
        where = f"{page}:{line.number}"
        if unknown:
            result.append(f"{where}: no records {', '.join(unknown)} in docs/benchmarks")
        elif numbers and not line.sources:
            result.append(f"{where}: {' '.join(numbers)} under no marker of figures or settings")
        elif numbers:
            one = "no row" if line.by_row else "nothing"
            result.append(f"{where}: {one} of {' '.join(line.sources)} has {' '.join(numbers)}")
    return result


def numbers_in(text: str) -> list[float]:
    return [float(match[0].replace(",", "")) for match in NUMBER.finditer(text)]


def read(name: str) -> Rows:
    """The rows of a source."""
    if name.startswith("recorded."):
        recorded = json.loads((RECORDS / "recorded.json").read_text())
        return [numbers_in(line) for line in recorded[name.removeprefix("recorded.")]["printed"]]
    if (Path(__file__).parent / f"{name}.py").exists():
        module = importlib.import_module(name)
        if hasattr(module, "tables"):
            return [numbers_in(line) for line in module.tables()]
    runs = json.loads((RECORDS / f"{name}.json").read_text())["runs"]
    return [row for run in runs for row in rows_of(run)]


def rows_of(run: dict[str, Any]) -> list[list[float]]:
    """The printed lines of a run, or else its numbers as one row."""
    if "printed" in run:
        return [numbers_in(line) for line in run["printed"]]
    return [[float(v) for v in run.values() if isinstance(v, (int, float))]]


@cache
def pages() -> dict[str, str]:
    """README.md and the pages of docs/, by their path."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def sources_of(texts: Mapping[str, str]) -> dict[str, Rows]:
    """All sources that the pages name and that exist."""
    bodies = [match[2] for text in texts.values() for match in MARKER.finditer(text)
              if match[1] in ("figures", "claims")]  # fmt: skip
    sources = {}
    for name in sorted({name for body in bodies for name in body.split()}):
        try:
            sources[name] = read(name)
        except (FileNotFoundError, KeyError):
            continue  # `complaints` names the page
    return sources


def main() -> None:
    if sys.argv[1:] == ["--sources"]:  # for the test: scripts of this folder hide other packages
        print(json.dumps(sources_of(pages())))
        return
    chosen = {path: text for path, text in pages().items() if path in (sys.argv[1:] or pages())}
    sources = sources_of(chosen)
    found = [sentence for page, text in chosen.items() for sentence in complaints(page, text, sources)]
    print("\n".join(found) or "every figure is in a record")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
