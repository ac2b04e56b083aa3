"""The inspection as one HTML page that needs nothing but itself."""

from __future__ import annotations

from html import escape

from isokron.inspection.figures import (
    conditions_by_damping,
    memory_by_examples,
    ranks,
    side_spectra,
    spectra,
)
from isokron.inspection.memory import POLICIES
from isokron.inspection.results import Inspection
from isokron.inspection.table import (
    COLUMNS,
    TOTALS,
    keys,
    layer_memory_rows,
    notes,
    policy_rows,
    rows,
)
from isokron.inspection.verdict import circumstances, verdict
from isokron.pages.dots import draw_dots
from isokron.pages.html import (
    bullets,
    document,
    figure,
    framed,
    plots,
    settings_table,
    sortable,
    table,
)

SPECTRUM = (
    "Dotted: the damping. Directions below it are all treated alike, those above by their own."
)
SIDE = "Steep: a few directions hold it all. Below 1e-7 all is rounding."
DOTS = "Dot: directions that matter, of all."
RINGS = (
    " Ring: the same after the best diagonal scaling; what is missing to 100 % is what a Kronecker "
    "preconditioner can still even out."
)
DAMPING = (
    "Layers by largest over mean eigenvalue. Where a curve is flat, the damping is below all "
    "eigenvalues of the layer and does nothing; where it is straight, twice the damping is half "
    "the condition number."
)


def page(result: Inspection) -> str:
    """The whole page; every text of the user's is escaped."""
    title = f"Curvature of {result.settings['task']}"
    said, dots = verdict(result), ranks(result)
    ringed = any(row.ring is not None for row in dots.rows)
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{_prose(said[:2])}</p>',
            f"<p>{_prose(said[2:])}</p>",
            f'<p class="soft">{escape(circumstances(result))}</p>',
            plots(
                [
                    framed(dots.title, draw_dots(dots), DOTS + RINGS * ringed),
                    figure(conditions_by_damping(result), DAMPING),
                ]
            ),
            "<h2>Layers</h2>",
            sortable("Layers", COLUMNS, rows(result), keys(result)),
            bullets(notes(result)),
            "<h2>Spectra</h2>",
            plots(figure(plot, SPECTRUM) for plot in spectra(result)),
            _sides(result),
            "<h2>Memory by policy</h2>",
            f"<p>{escape(_policies(result))}</p>",
            table(TOTALS, policy_rows(result)),
            plots([figure(memory_by_examples(result), _batch(result))]),
            _by_layer(result),
            settings_table(result.settings),
        ]
    )
    return document(title, body)


def _prose(sentences: list[str]) -> str:
    """Sentences in which no line ends between a number and its unit."""
    return escape(" ".join(sentences)).replace(" %", "\u00a0%").replace("× ", "×\u00a0")


def _sides(result: Inspection) -> str:
    found = side_spectra(result)
    if not found:
        return ""
    return f"<h2>Spectra of the sides</h2>\n{plots(figure(plot, SIDE) for plot in found)}"


def _policies(result: Inspection) -> str:
    return (
        f"K-FAC's statistics in float32, of {result.settings['examples']:,} examples. The output "
        "side of a layer with o outputs is a covariance of o × o, or the T gradients it is made "
        "of, o × T, one for every example and position. none: covariances; all: gradients; hybrid: "
        "gradients where o > 16,384; auto: gradients where T ≤ 0.75 o and T ≤ 8,192."
    )


def _batch(result: Inspection) -> str:
    return (
        "Gradients (all) take less than covariances (none) while there are fewer of them than "
        "outputs; auto chooses layer by layer. A batch of this task has "
        f"{result.settings['batch size']:,} examples."
    )


def _by_layer(result: Inspection) -> str:
    inside = table(("layer", *POLICIES, "input side"), layer_memory_rows(result), "names")
    return f"<details><summary>Output side by layer and policy</summary>{inside}</details>"
