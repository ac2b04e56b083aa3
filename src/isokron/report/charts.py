"""SVG charts: positions of lines, dots and bars; templates/charts.svg has the elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from isokron.report.render import environment, source

WIDTH = 480
COLOURS = 7
SHORT = 12  # characters of a name beside a curve
CHARACTER = 11.0  # width of a character of a label, generous for wide fonts
LEAST_SHARE = 1e-6  # smaller shares are drawn at the left edge of a dot plot
ROW = 24  # height of a row of a dot plot

Scale = Callable[[float], float]


@dataclass(frozen=True)
class Chart:
    """Fields of all charts. name: prefix of the ids in the SVG, unique on a page."""

    name: str
    title: str
    description: str
    x_label: str


@dataclass(frozen=True)
class Line:
    """A curve, with a label at its end unless it is thin."""

    label: str
    colour: int  # index into the palette; 0 is for AdamW
    points: Sequence[tuple[float, float]]
    thin: bool = False
    beside: str = ""  # text at its end; default: the label, shortened


@dataclass(frozen=True)
class Mark:
    """A dot, or a cross at the upper edge for a value that is not finite."""

    colour: int
    x: float
    y: float | None
    title: str
    ring: bool = False


@dataclass(frozen=True)
class Plot(Chart):
    """A line plot. y_range crops the y-axis; goal is drawn as a dotted line."""

    y_label: str
    lines: Sequence[Line] = field(repr=False)
    marks: Sequence[Mark] = field(default=(), repr=False)
    x_log: bool = False
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    goal: float | None = None
    empty: str = "no finished run"  # the text of a plot without points

    def _repr_svg_(self) -> str:
        """Display in a notebook, which would stretch a plot without a width to that of the page."""
        return standalone(self).replace("width: 100%", f"width: {WIDTH}px", 1)


@dataclass(frozen=True)
class Row:
    """A dot at `share`, optionally a ring at `ring`, and `text` on the right."""

    label: str
    beside: str
    share: float
    ring: float | None
    text: str


@dataclass(frozen=True)
class Dots(Chart):
    """A dot plot: one row per item, shares of 1 on a logarithmic axis."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class Area:
    """The rectangle between the axes of a chart, in units of the SVG, and the chart's height."""

    left: float
    right: float
    top: float
    bottom: float
    height: float
    width: float = WIDTH


def draw(plot: Plot) -> str:
    """A line plot as an <svg> element."""
    labelled = [line for line in plot.lines if not line.thin and line.points]
    short = short_names([line.label for line in labelled])
    names = [line.beside or name for line, name in zip(labelled, short, strict=True)]
    room = CHARACTER * max(map(len, names), default=0)
    area = Area(left=62, right=WIDTH - 14 - room, top=16, bottom=284, height=330)
    points = [point for line in plot.lines for point in line.points]
    xs = [x for x, _ in points] + [mark.x for mark in plot.marks]
    ys = [y for _, y in points] + [mark.y for mark in plot.marks if mark.y is not None]
    if not xs:
        return _svg("empty", plot, area)
    x_low, x_high = _range(xs, plot.x_log, pad=0.04 if plot.marks else 0)
    y_low, y_high = plot.y_range or _range(ys or [0.0, 1.0], plot.y_log, pad=0.05)
    to_y = _scale(y_low, y_high, area.bottom, area.top, plot.y_log)
    longest = 4 if plot.y_log else 6  # longer numbers would overlap the label of the axis
    return _svg(
        "plot",
        plot,
        area,
        to_x=_scale(x_low, x_high, area.left, area.right, plot.x_log),
        to_y=to_y,
        x_ticks=[(x, tick_text(x)) for x in ticks(x_low, x_high, plot.x_log, count=4)],
        y_ticks=[(y, tick_text(y, longest)) for y in ticks(y_low, y_high, plot.y_log)],
        labels=list(zip(labelled, names, _label_places(labelled, to_y, area), strict=True)),
    )


def standalone(plot: Plot) -> str:
    """A line plot as an SVG file with its own colours and background."""
    style = f"<style>{source('charts.css')}</style>"
    ground = '<rect class="ground" width="100%" height="100%" rx="6"/>'
    svg = draw(plot).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return svg.replace(">", f">{style}{ground}", 1) + "\n"


def draw_dots(dots: Dots) -> str:
    """A dot plot as an <svg> element."""
    bottom = 8 + ROW * len(dots.rows)
    area = Area(left=132, right=368, top=8, bottom=bottom, height=bottom + 46)
    shares = [row.share for row in dots.rows] + [row.ring or 1.0 for row in dots.rows]
    low = max(LEAST_SHARE, min([*(share for share in shares if share > 0), 0.5])) / 1.3
    to_x = _scale(low, 1.0, area.left, area.right, log=True)
    return _svg(
        "dots",
        dots,
        area,
        to_x=lambda share: to_x(min(1.0, max(low, share))),
        x_ticks=[(share, f"{100 * share:.4g} %") for share in ticks(low, 1.0, log=True)],
        rows=[(area.top + ROW * (i + 0.5), row) for i, row in enumerate(dots.rows)],
    )


def draw_histogram(
    chart: Chart, edges: Sequence[float], counts: Sequence[int], marks: Sequence[Sequence[float]]
) -> str:
    """A histogram as an <svg> element, with heights log(1 + count).

    marks: values to mark below the axis, with one colour per sequence.
    """
    area = Area(left=56, right=WIDTH - 10, top=10, bottom=132, height=190)
    low, high, largest = edges[0], edges[-1], max(counts)

    def to_y(count: float) -> float:
        # a few values far from zero must be visible next to thousands near it
        share = math.log1p(count) / math.log1p(largest)
        return area.bottom - share * (area.bottom - area.top)

    powers = [10**power for power in range(math.ceil(math.log10(largest + 1)))]
    return _svg(
        "histogram",
        chart,
        area,
        to_x=_scale(low, high, area.left, area.right, log=False),
        to_y=to_y,
        x_ticks=[(value, tick_text(value)) for value in ticks(low, high, log=False, count=4)],
        y_ticks=[(count, f"{count:,}") for count in powers],
        bars=list(zip(edges, edges[1:], counts, strict=False)),
        marks=marks,
    )


def short_names(labels: Sequence[str]) -> list[str]:
    """Short names for curves: `torch.optim:SGD(momentum=0.9)` → `SGD`.

    Options are shown, as far as they fit, only if the names would be equal without them.
    """
    full = [label[label.partition("(")[0].rfind(":") + 1 :] for label in labels]
    bare = [name.partition("(")[0] for name in full]
    names = [f if bare.count(b) > 1 else b for f, b in zip(full, bare, strict=True)]
    return [name if len(name) <= SHORT else name[: SHORT - 1] + "…" for name in names]


def ticks(low: float, high: float, log: bool, count: int = 5) -> list[float]:
    """Round numbers within [low, high]: steps of 1, 2 or 5, or decades on a log scale."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            values = [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]
            if len(values) >= 3:
                # more than six numbers would overlap
                return values[:: -(-len(values) // 6)]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.8 * raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, longest: int = 6) -> str:
    """At most four digits; a power of ten if that is shorter and there is no room."""
    plain = f"{abs(value):.4g}"
    digits, _, exponent = f"{abs(value):.3e}".partition("e")
    power = f"{float(digits):g}e{int(exponent)}"
    fits = "e" not in plain and len(plain) <= longest
    text = plain if fits else min(plain, power, key=len)
    return f"−{text}" if value < 0 else text


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Scale:
    """The map from [low, high] to [start, end], on a linear or a logarithmic axis."""
    f: Scale = math.log if log else float
    span = f(high) - f(low)
    return lambda value: start + (f(value) - f(low)) / span * (end - start)


def _range(values: Sequence[float], log: bool, pad: float) -> tuple[float, float]:
    """The range of the values, extended on both sides by a fraction `pad` of its length."""
    low, high = min(values), max(values)
    # a single value still needs an axis
    if log:
        margin = (high / low) ** pad if high > low else 1.5
        return low / margin, high * margin
    margin = (high - low) * pad if high > low else 0.5 * abs(high) or 0.5
    return low - margin, high + margin


def _label_places(lines: Sequence[Line], to_y: Scale, area: Area) -> list[float]:
    """Heights of the labels at the ends of curves, moved apart if they would overlap."""
    gap, low, high = 16.0, area.top + 4.0, area.bottom + 4.0
    ends = [min(high, max(low, to_y(line.points[-1][1]))) for line in lines]
    order = sorted(range(len(ends)), key=ends.__getitem__)
    places, free = [0.0] * len(ends), low
    for i in order:
        places[i] = max(ends[i], free)
        free = places[i] + gap
    # labels that were pushed below the axis move up
    for rank, i in enumerate(reversed(order)):
        places[i] = min(places[i], high - gap * rank)
    return places


def _svg(kind: str, chart: Chart, area: Area, **places: object) -> str:
    """Render a chart with its macro in charts.svg."""
    macros = environment().get_template("charts.svg").module
    return str(getattr(macros, kind)(chart, area, **places))
