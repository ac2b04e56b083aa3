"""A histogram as SVG text: bars of a logarithmic height, and ticks below for single values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from isokron.pages.plot import ticks

WIDTH, HEIGHT = 480, 190
TOP, BOTTOM, LEFT, RIGHT = 10, 58, 56, 10
BASE = HEIGHT - BOTTOM


@dataclass(frozen=True)
class Histogram:
    """Counts between edges. marks: colour of the palette and values to point out in it."""

    name: str
    title: str
    description: str
    x_label: str
    y_label: str
    edges: Sequence[float]
    counts: Sequence[int]
    marks: Sequence[tuple[int, Sequence[float]]] = ()


def draw_histogram(plot: Histogram) -> str:
    """An <svg> element that takes its colours from plot.css.

    Heights are log(1 + count): a few values far out are the point, among thousands near zero.
    """
    low, high = plot.edges[0], plot.edges[-1]
    most = math.log1p(max(plot.counts, default=0) or 1)

    def to_x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def to_y(count: float) -> float:
        return BASE - math.log1p(count) / most * (BASE - TOP)

    parts = []
    for power in range(math.ceil(math.log10(max(plot.counts, default=0) + 1))):
        y = to_y(10**power)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 7, y + 4, f"{10**power:,}", "end"))
    bars = "".join(
        f"M{to_x(a) + 0.5:.1f} {BASE}V{to_y(count):.1f}H{to_x(b) - 0.5:.1f}V{BASE}Z"
        for a, b, count in zip(plot.edges, plot.edges[1:], plot.counts, strict=False)
        if count
    )
    parts.append(f'<path class="bars" d="{bars}"/>')
    parts.append(f'<path class="axis" d="M{LEFT} {BASE}H{WIDTH - RIGHT}"/>')
    for value in ticks(low, high, log=False, count=4):
        parts.append(_text(to_x(value), BASE + 30, _tick(value, high - low), "middle"))
    for colour, values in plot.marks:
        lines = "".join(f"M{to_x(value):.1f} {BASE + 3}v11" for value in values)
        parts.append(f'<path class="curve thick c{colour}" d="{lines}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, plot.x_label, "middle", "name"))
    middle = (TOP + BASE) / 2
    parts.append(
        f'<text class="name" transform="translate(13 {middle:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(plot.y_label)}</text>'
    )
    inside = "\n".join(parts)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="{plot.name}-title {plot.name}-desc">\n'
        f'<title id="{plot.name}-title">{escape(plot.title)}</title>\n'
        f'<desc id="{plot.name}-desc">{escape(plot.description)}</desc>\n{inside}\n</svg>'
    )


def _tick(value: float, span: float) -> str:
    """A round number, of which floats leave 1e-17 in place of zero."""
    if not 1e-3 <= span < 1e7:
        return f"{value:.3g}".replace("-", "−", 1) if abs(value) > 1e-9 * span else "0"
    return f"{round(value, 9):,.9g}".replace("-", "−", 1)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'
