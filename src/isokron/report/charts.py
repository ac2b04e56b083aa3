"""SVG charts as text: line plots, dot plots and histograms, coloured by charts.css."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 480, 330
TOP, BOTTOM, LEFT = 16, 46, 62
CHARACTER = 11.0  # width of one at the label size, generous for wide fonts
COLOURS = 7
CSS = Path(__file__).with_name("charts.css")

DOT_ROW, DOT_TOP, DOT_LEFT, DOT_RIGHT = 24, 8, 132, 368
LEAST_SHARE = 1e-6  # smaller shares are drawn on the left edge of a dot plot

HIST_HEIGHT, HIST_TOP, HIST_BOTTOM, HIST_LEFT, HIST_RIGHT = 190, 10, 58, 56, 10

Scale = Callable[[float], float]
Limits = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """What all charts have. name: prefix of the ids in the SVG, unique on a page."""

    name: str
    title: str
    description: str
    x_label: str


@dataclass(frozen=True)
class Line:
    """A curve, with a label at its end unless it is thin."""

    label: str
    colour: int  # index into the palette, 0 being the yardstick's
    points: Sequence[tuple[float, float]]
    thin: bool = False
    beside: str = ""  # the text at its end, by default the label, shortened


@dataclass(frozen=True)
class Mark:
    """A dot, or a cross on the upper edge for what has no finite value."""

    colour: int
    x: float
    y: float | None
    title: str
    ring: bool = False


@dataclass(frozen=True)
class Plot(Chart):
    """A line plot. y_range crops; goal is a level to compare with, drawn as a dotted line."""

    y_label: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    x_log: bool = False
    y_log: bool = False
    y_range: Limits | None = None
    goal: float | None = None
    empty: str = "no finished run"  # the text of a plot without points


@dataclass(frozen=True)
class Row:
    """A dot at `share` and optionally a ring at `ring`; `text` stands at the right."""

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
class Histogram(Chart):
    """Counts between edges. marks: (palette index, values to point out below the axis)."""

    y_label: str
    edges: Sequence[float]
    counts: Sequence[int]
    marks: Sequence[tuple[int, Sequence[float]]] = ()


def draw(plot: Plot) -> str:
    """A line plot as an <svg> element."""
    labels = [line for line in plot.lines if not line.thin and line.points]
    shortened = short_names([line.label for line in labels])
    names = [line.beside or name for line, name in zip(labels, shortened, strict=True)]
    right = WIDTH - 14 - CHARACTER * max(map(len, names), default=0)
    points = [point for line in plot.lines for point in line.points]
    xs = [x for x, _ in points] + [mark.x for mark in plot.marks]
    ys = [y for _, y in points] + [mark.y for mark in plot.marks if mark.y is not None]
    if not xs:
        return _svg(plot, HEIGHT, [axis_text("tick", WIDTH / 2, HEIGHT / 2, plot.empty, "middle")])
    low, high = _range(ys or [0.0, 1.0], plot.y_log) if plot.y_range is None else plot.y_range
    x_limits = _range(xs, plot.x_log, pad=0.04 if plot.marks else 0)
    to_x = scale(*x_limits, LEFT, right, plot.x_log)
    to_y = scale(low, high, HEIGHT - BOTTOM, TOP, plot.y_log)
    parts = [
        *_axes(plot, to_x, to_y, x_limits, (low, high), right),
        f'<clipPath id="{plot.name}-clip"><rect x="{LEFT}" y="{TOP - 4}" '
        f'width="{right - LEFT + 4:.0f}" height="{HEIGHT - TOP - BOTTOM + 8}"/></clipPath>',
        f'<g clip-path="url(#{plot.name}-clip)">',
        *(_curve(line, to_x, to_y) for line in plot.lines if line.points),
        "</g>",
        *(_mark(mark, to_x, to_y) for mark in plot.marks),
        *_labels(labels, names, to_y, right),
    ]
    return _svg(plot, HEIGHT, parts)


def standalone(plot: Plot) -> str:
    """A line plot as an SVG file with its own colours and background."""
    style = f"<style>{CSS.read_text(encoding='utf-8')}</style>"
    ground = f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
    svg = draw(plot).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    start = svg.index(">") + 1
    return f"{svg[:start]}{style}{ground}{svg[start:]}\n"


def draw_dots(dots: Dots) -> str:
    """A dot plot as an <svg> element."""
    base = DOT_TOP + DOT_ROW * len(dots.rows)
    shares = [row.share for row in dots.rows] + [row.ring or 1.0 for row in dots.rows]
    low = max(LEAST_SHARE, min([*(share for share in shares if share > 0), 0.5])) / 1.3
    to_x = scale(low, 1.0, DOT_LEFT, DOT_RIGHT, True)
    parts = []
    for value in ticks(low, 1.0, True):
        x = to_x(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {DOT_TOP}V{base}"/>')
        parts.append(axis_text("tick", x, base + 19, f"{100 * value:.4g} %", "middle"))
    parts.append(f'<path class="axis" d="M{DOT_LEFT} {base}H{DOT_RIGHT}"/>')
    middle = (DOT_LEFT + DOT_RIGHT) / 2
    parts.append(axis_text("name", middle, base + BOTTOM - 8, dots.x_label, "middle"))
    for i, row in enumerate(dots.rows):
        y = DOT_TOP + DOT_ROW * (i + 0.5)
        parts += _dot_row(row, y, lambda share: to_x(min(1.0, max(low, share))))
    return _svg(dots, base + BOTTOM, parts)


def draw_histogram(plot: Histogram) -> str:
    """A histogram as an <svg> element, with heights log(1 + count)."""
    low, high = plot.edges[0], plot.edges[-1]
    base, right = HIST_HEIGHT - HIST_BOTTOM, WIDTH - HIST_RIGHT
    largest = max(plot.counts, default=0)
    to_x = scale(low, high, HIST_LEFT, right, False)

    def to_y(count: float) -> float:
        # a few values far from zero must stay visible beside thousands near it
        return base - math.log1p(count) / math.log1p(largest or 1) * (base - HIST_TOP)

    parts = []
    for power in range(math.ceil(math.log10(largest + 1))):
        y = to_y(10**power)
        parts.append(f'<path class="grid" d="M{HIST_LEFT} {y:.1f}H{right}"/>')
        parts.append(axis_text("tick", HIST_LEFT - 7, y + 4, f"{10**power:,}", "end"))
    bars = "".join(
        f"M{to_x(a) + 0.5:.1f} {base}V{to_y(count):.1f}H{to_x(b) - 0.5:.1f}V{base}Z"
        for a, b, count in zip(plot.edges, plot.edges[1:], plot.counts, strict=False)
        if count
    )
    parts.append(f'<path class="bars" d="{bars}"/>')
    parts.append(f'<path class="axis" d="M{HIST_LEFT} {base}H{right}"/>')
    for value in ticks(low, high, log=False, count=4):
        text = _histogram_tick(value, high - low)
        parts.append(axis_text("tick", to_x(value), base + 30, text, "middle"))
    for colour, values in plot.marks:
        # bins are rounded, and a value must not leave the chart
        places = [to_x(min(high, max(low, value))) for value in values]
        lines = "".join(f"M{x:.1f} {base + 3}v11" for x in places)
        parts.append(f'<path class="curve thick c{colour}" d="{lines}"/>')
    middle = (HIST_LEFT + right) / 2
    parts.append(axis_text("name", middle, HIST_HEIGHT - 8, plot.x_label, "middle"))
    parts.append(_y_name((HIST_TOP + base) / 2, plot.y_label))
    return _svg(plot, HIST_HEIGHT, parts)


def short(label: str, options: bool = False, limit: int = 12) -> str:
    """`torch.optim:SGD(momentum=0.9)` → `SGD`, or with options as far as they fit."""
    name, parenthesis, arguments = label.partition("(")
    text = name.rpartition(":")[2] + (parenthesis + arguments if options else "")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def short_names(labels: Sequence[str]) -> list[str]:
    """Names that fit beside curves; options only where names alone would be the same."""
    bare = [short(label) for label in labels]
    return [
        short(label, options=bare.count(name) > 1) for label, name in zip(labels, bare, strict=True)
    ]


def ticks(low: float, high: float, log: bool, count: int = 5) -> list[float]:
    """Round numbers within [low, high]: steps of 1, 2 or 5, or their decades on a log scale."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            values = [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]
            if len(values) >= 3:
                return values[:: -(-len(values) // 6)]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.8 * raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, most: int = 6) -> str:
    """Four digits at most; a power of ten where that is shorter and there is no room for more."""
    plain = f"{value:.4g}"
    digits, _, exponent = f"{value:.3e}".partition("e")
    power = f"{float(digits):g}e{int(exponent)}"
    fits = "e" not in plain and len(plain) <= most
    return plain if fits or len(plain) <= len(power) else power


def scale(low: float, high: float, start: float, end: float, log: bool) -> Scale:
    """The map from [low, high] to [start, end], on a linear or a logarithmic axis."""
    f: Scale = math.log if log else float
    span = f(high) - f(low)
    return lambda value: start + (f(value) - f(low)) / span * (end - start)


def axis_text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    """A <text> element; kind: its class in charts.css."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _range(values: Sequence[float], log: bool, pad: float = 0.05) -> Limits:
    low, high = min(values), max(values)
    if log:
        margin = (high / low) ** pad if high > low else 1.5
        return low / margin, high * margin
    margin = (high - low) * pad if high > low else 0.5 * abs(high) or 0.5
    return low - margin, high + margin


def _svg(chart: Chart, height: int, parts: Sequence[str]) -> str:
    """The element around a chart, with a title and description for screen readers."""
    inside = "\n".join(parts)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{chart.name}-title {chart.name}-desc">\n'
        f'<title id="{chart.name}-title">{escape(chart.title)}</title>\n'
        f'<desc id="{chart.name}-desc">{escape(chart.description)}</desc>\n{inside}\n</svg>'
    )


def _y_name(middle: float, text: str) -> str:
    return (
        f'<text class="name" transform="translate(13 {middle:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(text)}</text>'
    )


def _axes(
    plot: Plot, to_x: Scale, to_y: Scale, x_limits: Limits, y_limits: Limits, right: float
) -> list[str]:
    base = HEIGHT - BOTTOM
    most = 4 if plot.y_log else 6  # longer numbers would touch the name of the axis
    parts = []
    for value in ticks(*y_limits, plot.y_log):
        y = to_y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right:.1f}"/>')
        parts.append(axis_text("tick", LEFT - 7, y + 4, tick_text(value, most), "end"))
    if plot.goal is not None and y_limits[0] <= plot.goal <= y_limits[1]:
        parts.append(f'<path class="goal" d="M{LEFT} {to_y(plot.goal):.1f}H{right:.1f}"/>')
    for value in ticks(*x_limits, plot.x_log, count=4):
        x = to_x(value)
        parts.append(f'<path class="axis" d="M{x:.1f} {base}v5"/>')
        parts.append(axis_text("tick", x, base + 19, tick_text(value), "middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {base}H{right:.1f}"/>')
    middle = (LEFT + right) / 2
    parts.append(axis_text("name", middle, HEIGHT - 8, plot.x_label, "middle"))
    parts.append(_y_name((TOP + base) / 2, plot.y_label))
    return parts


def _curve(line: Line, to_x: Scale, to_y: Scale) -> str:
    path = "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in line.points)
    weight = "thin" if line.thin else "thick"
    return f'<path class="curve {weight} c{line.colour % COLOURS}" d="M{path}"/>'


def _mark(mark: Mark, to_x: Scale, to_y: Scale) -> str:
    x = to_x(mark.x)
    title = f"<title>{escape(mark.title)}</title>"
    colour = f"c{mark.colour % COLOURS}"
    if mark.y is None:
        # crosses of several optimizers at one learning rate sit side by side
        x, top = x + 9 * (mark.colour % COLOURS) - 9, TOP + 6
        cross = f"M{x - 4:.1f} {top - 4}l8 8m0 -8l-8 8"
        return f'<path class="cross {colour}" d="{cross}">{title}</path>'
    y = to_y(mark.y)
    ring = f'<circle class="ring {colour}" cx="{x:.1f}" cy="{y:.1f}" r="7.5"/>' if mark.ring else ""
    return f'{ring}<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'


def _labels(lines: Sequence[Line], names: Sequence[str], to_y: Scale, right: float) -> list[str]:
    """Names right of the curves' ends, pushed apart where they would overlap."""
    gap, low, high = 16.0, TOP + 4.0, HEIGHT - BOTTOM + 4.0
    ends = [to_y(line.points[-1][1]) for line in lines]
    wanted = sorted((min(high, max(low, y)), i) for i, y in enumerate(ends))
    places: list[float] = []
    for y, _ in wanted:
        places.append(max(y, places[-1] + gap) if places else y)
    if places and places[-1] > high:
        # only those crowded against the bottom move up
        for i in range(len(places)):
            places[i] = min(places[i], high - gap * (len(places) - 1 - i))
    return [
        f'<text class="label c{lines[i].colour % COLOURS}" x="{right + 8:.1f}" y="{y + 4.5:.1f}">'
        f"<title>{escape(lines[i].label)}</title>{escape(names[i])}</text>"
        for y, (_, i) in zip(places, wanted, strict=True)
    ]


def _dot_row(row: Row, y: float, to_x: Scale) -> list[str]:
    x = to_x(row.share)
    title = f"<title>{escape(f'{row.label}: {row.text}')}</title>"
    parts = [
        axis_text("tick", DOT_LEFT - 9, y + 4.5, row.beside, "end"),
        f'<path class="grid" d="M{DOT_LEFT} {y}H{DOT_RIGHT}"/>',
    ]
    if row.ring is not None:
        end = to_x(row.ring)
        parts.append(f'<path class="reach c1" d="M{x:.1f} {y}H{end:.1f}"/>')
        parts.append(f'<circle class="open c1" cx="{end:.1f}" cy="{y}" r="4.5"/>')
    parts.append(f'<circle class="dot c1" cx="{x:.1f}" cy="{y}" r="4.5">{title}</circle>')
    parts.append(axis_text("tick", DOT_RIGHT + 12, y + 4.5, row.text, "start"))
    return parts


def _histogram_tick(value: float, span: float) -> str:
    # sums of steps leave 1e-17 in place of zero
    if not 1e-3 <= span < 1e7:
        return f"{value:.3g}".replace("-", "−", 1) if abs(value) > 1e-9 * span else "0"
    return f"{round(value, 9):,.9g}".replace("-", "−", 1)
