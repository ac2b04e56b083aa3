"""Dot plots as SVG text: a row per thing, its shares of 1 on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from isokron.pages.plot import WIDTH, axis_text, scale, ticks

ROW, TOP, BOTTOM = 24, 8, 46
LEFT, RIGHT = 132, 368
LEAST = 1e-6  # shares below lie on the left edge


@dataclass(frozen=True)
class Row:
    """A dot at `share` and, if there is one, a ring at `ring`; `text` stands at the right."""

    label: str
    beside: str
    share: float
    ring: float | None
    text: str


@dataclass(frozen=True)
class Dots:
    name: str
    title: str
    description: str
    x_label: str
    rows: Sequence[Row]


def draw_dots(dots: Dots) -> str:
    """The plot as an <svg> element that takes its colours from plot.css."""
    height = TOP + ROW * len(dots.rows) + BOTTOM
    base = height - BOTTOM
    every = [row.share for row in dots.rows] + [row.ring or 1.0 for row in dots.rows]
    low = max(LEAST, min([*(value for value in every if value > 0), 0.5])) / 1.3
    to_x = scale(low, 1.0, LEFT, RIGHT, True)

    def place(share: float) -> float:
        return to_x(min(1.0, max(low, share)))

    parts = []
    for value in ticks(low, 1.0, True):
        x = to_x(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{base}"/>')
        parts.append(axis_text("tick", x, base + 19, _percent(value), "middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {base}H{RIGHT}"/>')
    middle = (LEFT + RIGHT) / 2
    parts.append(axis_text("name", middle, height - 8, dots.x_label, "middle"))
    for i, row in enumerate(dots.rows):
        y = TOP + ROW * (i + 0.5)
        x = place(row.share)
        title = f"<title>{escape(f'{row.label}: {row.text}')}</title>"
        parts.append(axis_text("tick", LEFT - 9, y + 4.5, row.beside, "end"))
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        if row.ring is not None:
            end = place(row.ring)
            parts.append(f'<path class="reach c1" d="M{x:.1f} {y}H{end:.1f}"/>')
            parts.append(f'<circle class="open c1" cx="{end:.1f}" cy="{y}" r="4.5"/>')
        parts.append(f'<circle class="dot c1" cx="{x:.1f}" cy="{y}" r="4.5">{title}</circle>')
        parts.append(axis_text("tick", RIGHT + 12, y + 4.5, row.text, "start"))
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{dots.name}-title {dots.name}-desc">\n'
        f'<title id="{dots.name}-title">{escape(dots.title)}</title>\n'
        f'<desc id="{dots.name}-desc">{escape(dots.description)}</desc>\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
