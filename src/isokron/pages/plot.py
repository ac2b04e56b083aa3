"""Line plots as SVG text: axes, curves, marks, and labels at the ends of the curves."""

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
CSS = Path(__file__).with_name("plot.css")


@dataclass(frozen=True)
class Line:
    """A curve. colour: index into the palette, 0 being the yardstick's; thin: no label.

    beside: the text at its end; without, the label, shortened.
    """

    label: str
    colour: int
    points: Sequence[tuple[float, float]]
    thin: bool = False
    beside: str = ""


@dataclass(frozen=True)
class Mark:
    """A dot, or a cross on the upper edge for what has no finite value."""

    colour: int
    x: float
    y: float | None
    title: str
    ring: bool = False


@dataclass(frozen=True)
class Plot:
    """All that is drawn. y_range crops; goal is a level to compare with, drawn as a dotted line."""

    name: str
    title: str
    description: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    x_log: bool = False
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    goal: float | None = None
    empty: str = "no finished run"  # said where there is nothing to draw


Scale = Callable[[float], float]


def draw(plot: Plot) -> str:
    """The plot as an <svg> element that takes its colours from plot.css."""
    labels = [line for line in plot.lines if not line.thin and line.points]
    made = short_names([line.label for line in labels])
    names = [line.beside or name for line, name in zip(labels, made, strict=True)]
    longest = max(map(len, names), default=0)
    right = WIDTH - 14 - CHARACTER * longest
    points = [point for line in plot.lines for point in line.points]
    xs = [x for x, _ in points] + [mark.x for mark in plot.marks]
    ys = [y for _, y in points] + [mark.y for mark in plot.marks if mark.y is not None]
    if not xs:
        return _frame(plot, axis_text("tick", WIDTH / 2, HEIGHT / 2, plot.empty, "middle"))
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
    return _frame(plot, "\n".join(parts))


def standalone(plot: Plot) -> str:
    """The plot as a file of its own, with its colours and a ground to stand on."""
    style = f"<style>{CSS.read_text(encoding='utf-8')}</style>"
    ground = f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
    svg = draw(plot).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    start = svg.index(">") + 1
    return f"{svg[:start]}{style}{ground}{svg[start:]}\n"


def short(label: str, options: bool = False, limit: int = 12) -> str:
    """`torch.optim:SGD(momentum=0.9)` → `SGD`, or with options as far as they fit."""
    name, parenthesis, rest = label.partition("(")
    text = name.rpartition(":")[2] + (parenthesis + rest if options else "")
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
            found = [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]
            if len(found) >= 3:
                return found[:: -(-len(found) // 6)]
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


def _range(values: Sequence[float], log: bool, pad: float = 0.05) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        margin = (high / low) ** pad if high > low else 1.5
        return low / margin, high * margin
    margin = (high - low) * pad if high > low else 0.5 * abs(high) or 0.5
    return low - margin, high + margin


def scale(low: float, high: float, start: float, end: float, log: bool) -> Scale:
    """[low, high] to [start, end], on a straight or a logarithmic axis."""
    f: Scale = math.log if log else float
    span = f(high) - f(low)
    return lambda value: start + (f(value) - f(low)) / span * (end - start)


def _frame(plot: Plot, inside: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="{plot.name}-title {plot.name}-desc">\n'
        f'<title id="{plot.name}-title">{escape(plot.title)}</title>\n'
        f'<desc id="{plot.name}-desc">{escape(plot.description)}</desc>\n{inside}\n</svg>'
    )


def _axes(
    plot: Plot,
    to_x: Scale,
    to_y: Scale,
    x_limits: tuple[float, float],
    y_limits: tuple[float, float],
    right: float,
) -> list[str]:
    base = HEIGHT - BOTTOM
    most = 4 if plot.y_log else 6  # characters beside which the name of the axis has room
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
    parts.append(
        f'<text class="name" transform="translate(13 {(TOP + base) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(plot.y_label)}</text>'
    )
    return parts


def axis_text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    """A <text> element; kind: its class in plot.css."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


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
    wanted = sorted(
        (min(high, max(low, to_y(line.points[-1][1]))), i) for i, line in enumerate(lines)
    )
    places: list[float] = []
    for y, _ in wanted:
        places.append(max(y, places[-1] + gap) if places else y)
    shift = max(0.0, places[-1] - high) if places else 0.0
    # only those crowded against the bottom move up
    for i in range(len(places) - 1, -1, -1):
        ceiling = high - gap * (len(places) - 1 - i)
        places[i] = min(places[i], ceiling) if shift else places[i]
    return [
        f'<text class="label c{lines[i].colour % COLOURS}" x="{right + 8:.1f}" y="{y + 4.5:.1f}">'
        f"<title>{escape(lines[i].label)}</title>{escape(names[i])}</text>"
        for y, (_, i) in zip(places, wanted, strict=True)
    ]
