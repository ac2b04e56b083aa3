"""Figures in the documentation, and the records they come from.

    python benchmarks/figures.py [README.md docs/katie.md]

prints every decimal number of these pages (default: README.md and docs/*.md) that no record has;
tests/test_figures.py requires that there is none. Hidden comments in a page name the records. They
hold until the next heading, and `figures` and `claims` also until the next of their kind:

    <!-- figures: ablations long_races -->      the numbers of a table row, or of a line of printed
                                                output, must be in one row of these sources, in
                                                this order; one in a sentence may be in any row
    <!-- claims: long_races memory -->          numbers of a table row too may be in any row, of
                                                those that name an optimizer that it names
    <!-- derived: 0.16 = 1.437 - 1.275; 3.9 = 2.83 / 0.73 -->   computed from numbers of the sources
    <!-- settings: 0.003 0.9 -->                chosen, defined or cited, not measured here

A source is docs/benchmarks/NAME.json, whose rows are the lines of `tables()` in benchmarks/NAME.py
where there is such a function, else its runs (`NAME.runs`: always its runs); or `recorded.NAME`, an
entry of recorded.json: older figures whose output was not kept, copied from the pages. A number
agrees with a row at the digits that the page has. Code, links, versions, arXiv numbers and indented
formulas are not looked at.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs" / "benchmarks"
NUMBER = re.compile(r"(?<![\w.^])(?<!\w-)(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\.?\w)")
MARKER = re.compile(r"<!--\s*(figures|claims|derived|settings):(.*?)-->", re.DOTALL)
VERSION = re.compile(
    r"\b(?:Python|PyTorch|torch|Triton|CUDA|jax) \d+\.\d+((, | and | or )\d+\.\d+)*"
)
NOT_FIGURES = re.compile(
    r"``?[^`\n]+``?"  # code
    r"|(?<=\])\([^)\n]*\)"  # targets of links
    r"|\b\d{4}\.\d{4,5}\b"  # arXiv
    r"|^ {4}\S.*$|" + VERSION.pattern,
    re.MULTILINE,
)
Sources = Mapping[str, Sequence[str]]  # by name: rows, as they were printed
OPTIMIZERS = ("adamw", "soap", "shampoo", "katie", "muon", "quad", "skew", "natural")


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
    raw: str = ""  # with its code

    def figures(self) -> list[re.Match[str]]:
        """Decimal numbers and, right of the first cell of a table, whole numbers too."""
        label = self.text.find("|", 1) if self.text.startswith("|") else -1
        start = label if self.by_row else len(self.text)
        return [m for m in NUMBER.finditer(self.text) if "." in m[0] or m.start() > start]


def lines_of(page: str, text: str) -> Iterator[Line]:
    """The lines of a page that have figures, without code, links and markers."""
    text = re.sub(r"^```(?!text)\w.*?^```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    raw = text.split("\n")
    markers = {text.count("\n", 0, match.start()): match for match in MARKER.finditer(text)}
    text = NOT_FIGURES.sub(_blank, MARKER.sub(_blank, text))
    line = Line(page, 0, "")
    fenced, claims = False, False
    contents = text.split("\n")
    for number, (content, after) in enumerate(zip(contents, [*contents[1:], ""], strict=True)):
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
        heads = re.match(r"\|[-|]+$", after)
        row = fenced or (content.startswith("|") and not heads)
        by_row = row and bool(line.sources) and not claims
        shown = Line(
            page,
            number + 1,
            content,
            line.sources,
            by_row,
            line.settings,
            line.derived,
            raw[number],
        )
        if shown.figures() and not re.fullmatch(r"[|\-\s]*", content):
            yield shown


def _blank(match: re.Match[str]) -> str:
    """As many lines, and as many characters on one line, without content."""
    return re.sub(r"[^\n]", " ", match[0])


def agree(printed: str, stated: str) -> bool:
    """Whether two numbers are equal at the digits of the second."""
    difference = float(printed.replace(",", "")) - float(stated.replace(",", ""))
    return abs(difference) <= 0.5 * 10 ** -_digits(stated) * (1 + 1e-9)


def _digits(number: str) -> int:
    return len(number.partition(".")[2])


def has(numbers: Iterable[str], stated: str) -> bool:
    """Whether a number of a sentence is among these, which may have one digit more.

    With more digits dropped, a wrong number would often agree with some other one by chance.
    """
    return any(agree(n, stated) and _digits(n) <= _digits(stated) + 1 for n in numbers)


def missing(line: Line, sources: Sources) -> list[str]:
    """The numbers of a line that no source has."""
    lines = [row for source in line.sources for row in sources.get(source, ())]
    operands = [number for row in lines for number in numbers_in(row)]
    named = [name for name in OPTIMIZERS if name in line.raw.lower()]
    if line.raw.startswith("|") and not line.by_row and named:
        lines = [row for row in lines if any(name in row.lower() for name in named)]
    rows = [numbers_in(row) for row in lines]
    numbers = [match[0] for match in line.figures() if match[0] not in line.settings]
    numbers = [n for n in numbers if n not in line.derived or not _follows(n, line, operands)]
    if not line.by_row:
        everywhere = [number for row in rows for number in row]
        return [number for number in numbers if not has(everywhere, number)]
    return min((_not_in_order(row, numbers) for row in rows), key=len, default=numbers)


def _not_in_order(row: Sequence[str], numbers: Sequence[str]) -> list[str]:
    """The numbers that a row does not have, or not in this order."""
    position, lacking = 0, []
    for number in numbers:
        index = next((i for i in range(position, len(row)) if agree(row[i], number)), None)
        if index is None:
            lacking.append(number)
        else:
            position = index + 1
    return lacking


def _follows(stated: str, line: Line, everywhere: Sequence[str]) -> bool:
    """Whether the expression of a `derived` marker has this value, of operands in the sources."""
    expression = line.derived[stated]
    if not re.fullmatch(r"[\d.\s()+*/-]+", expression):
        return False
    operands = re.findall(r"\d+\.\d+", expression)
    value = str(abs(eval(expression)))  # digits and operators alone, by the line above
    in_sources = (any(agree(n, operand) for n in everywhere) for operand in operands)
    return agree(value, stated) and all(in_sources)


def complaints(page: str, text: str, sources: Sources) -> list[str]:
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


@cache
def numbers_in(text: str) -> list[str]:
    return [match[0] for match in NUMBER.finditer(text)]


def recorded_entries() -> dict[str, Any]:
    """Older figures, copied from pages: command, machine, date, page and lines."""
    return json.loads((RECORDS / "recorded.json").read_text())


def read(name: str) -> Sequence[str]:
    """The rows of a source."""
    if name.startswith("recorded."):
        return recorded_entries()[name.removeprefix("recorded.")]["printed"]
    script = Path(__file__).parent / f"{name}.py"
    if name in TABLES or (script.exists() and "\ndef tables(" in script.read_text()):
        importlib.import_module("records").Records.frozen = True
        return (TABLES.get(name) or importlib.import_module(name).tables)()
    runs = json.loads((RECORDS / f"{name.removesuffix('.runs')}.json").read_text())["runs"]
    return [row for run in runs for row in rows_of(run)]


def rows_of(run: dict[str, Any]) -> list[str]:
    """The printed lines of a run, or else its values as one row."""
    values = (str(value) for value in run.values() if not isinstance(value, list | dict))
    return run["printed"] if "printed" in run else [" ".join(values)]


def long_races() -> list[str]:
    """The rows of the tables."""
    module = importlib.import_module("long_races")
    return [row for name in _long_races() for row in module.table(name, module.OPTIMIZERS)]


def long_race_shares() -> list[str]:
    """By task: losses at 16x, with Katie's schedule; losses by share of the steps."""
    module, lines = importlib.import_module("long_races"), []
    for name in _long_races():
        study, steps = module.Study(name), module.LONG * module.SHORT[name]
        names = ("adamw", "katie", "shampoo", "soap")
        cells = [row.split(" | ") for row in module.table(name, names[1:])[3:]]
        losses = ", ".join(row[3] for row in cells[: len(names)])
        lines.append(f"{name}, {steps} steps: {losses}; {cells[1][5]} of the steps, {cells[1][6]}")
        for optimizer in module.OPTIMIZERS:
            if (setting := study.chosen(optimizer)) is not None:
                by_share = {s: study.loss(setting, round(s * steps)) for s in (0.4, 0.6, 0.8, 1.0)}
                lines += [f"{name}, {optimizer}, {s} of the steps: {loss:.3f}"
                          for s, loss in by_share.items()]  # fmt: skip
    return lines


def _long_races() -> list[str]:
    return sorted(path.stem for path in (RECORDS / "long_races").glob("*.json"))


TABLES = {
    "long_races": long_races,
    "long_races.shares": long_race_shares,
}


@cache
def pages() -> dict[str, str]:
    """README.md and the pages of docs/, by their path."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def sources_of(texts: Mapping[str, str]) -> dict[str, Sequence[str]]:
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
    found = [
        sentence for page, text in chosen.items() for sentence in complaints(page, text, sources)
    ]
    print("\n".join(found) or "every figure is in a record")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
