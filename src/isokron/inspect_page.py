"""An inspection as table, page and files, with the memory of K-FAC's statistics by policy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isokron.curvature import Curvature
from isokron.files import write_atomically
from isokron.inspect import POLICIES, Inspection, LayerFacts
from isokron.report import render
from isokron.report.charts import COLOURS, Dots, Line, Plot, Row
from isokron.report.render import MISSING, finite, memory

RECORDS, PAGE, CURVATURE = "inspect.json", "index.html", "curvature"
# columns in the order in which a narrow terminal leaves them out
SPARE = ("kind", "trace", "condition", "above damping", "statistics", "outputs × inputs")
LOWEST = 1e-7  # of float32, relative to the largest: eigenvalues below are rounding
SHORT = 13  # characters of a layer's name in a plot
LOG: Any = {"x_log": True, "y_log": True}
DEAD = "no curvature"  # text of an empty plot
# field of a layer → name, title, unit and description of its plots
SPECTRA = {
    "spectrum": (
        *("spectra", "All eigenvalues", "eigenvalue / mean"),
        "Eigenvalues of every layer over their mean, falling; the dotted line is the damping.",
    ),
    "input_spectrum": (
        *("input", "Side of the inputs, A", "eigenvalue / largest"),
        "Eigenvalues of the covariance of inputs, A, divided by the largest.",
    ),
    "output_spectrum": (
        *("output", "Side of the output gradients, G", "eigenvalue / largest"),
        "Eigenvalues of the covariance of output gradients, G, divided by the largest.",
    ),
}


def write_report(result: Inspection, curvature: Curvature, folder: Path) -> None:
    """Write each file atomically; the page comes last, and means that all are there."""
    record = asdict(result) | {"memory": result.by_policy()}
    text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"
    html = page(result)
    # an older page would show what is not in the folder any more
    (folder / PAGE).unlink(missing_ok=True)
    curvature.save(folder / CURVATURE)
    write_atomically(folder / RECORDS, [text.encode()])
    write_atomically(folder / PAGE, [html.encode()])


def page(result: Inspection) -> str:
    """The page as one HTML file that needs nothing else."""
    verdict, circumstances, notes = texts(result)
    rows = [cells(facts) for facts in result.layers]
    sides = (spectra(result, "input_spectrum"), spectra(result, "output_spectrum"))
    return render.render(
        "inspect.html",
        title=f"Curvature of {result.settings['task']}",
        s=result.settings,
        result=result,
        sentences=(verdict, circumstances, notes),
        columns=list(rows[0]),
        rows=[list(row.values()) for row in rows],
        policies=POLICIES,
        dots=ranks(result),
        conditions=conditions_by_damping(result),
        spectra=spectra(result, "spectrum"),
        side_spectra=[plot for pair in zip(*sides, strict=True) for plot in pair],
        memory_by_examples=memory_by_examples(result),
    )


def texts(result: Inspection) -> tuple[list[str], str, list[str]]:
    """The verdict in sentences, the circumstances in one, and notes on how to read the table."""
    text = render.render(
        "inspect.txt",
        result=result,
        s=result.settings,
        alive=[facts for facts in result.layers if facts.trace > 0],
        policies={p["policy"]: p["outputs"] + p["inputs"] for p in result.by_policy()},
        rounded=any(map(_rounded, result.layers)),
        formats={"number": number, "percent": percent, "memory": memory},
    )
    verdict, _, remarks = text.strip().partition("\n\n")
    circumstances, *notes = remarks.strip().split("\n")
    return verdict.split("\n"), circumstances, notes


def _rounded(facts: LayerFacts) -> bool:
    """Whether the smallest eigenvalue is below what float32 can tell from 0."""
    sides = (facts.output_spectrum, facts.input_spectrum)
    small = any(side and side[-1][1] < LOWEST * side[0][1] for side in sides)
    return small or facts.condition > LOWEST**-2


def number(value: float) -> str:
    """A condition number: three digits, thousands apart, powers of ten where it is large."""
    if not math.isfinite(value):
        return "infinite"
    return f"{value:.1e}" if value >= 1e6 else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def cells(f: LayerFacts) -> dict[str, tuple[str, float | str]]:
    """A layer's row: column → the text of the cell, and what it is sorted by."""
    blocks = "" if f.blocks == 1 else f"{f.blocks} × "
    above, scaled = f.kept / f.dimension, f.scaled_share
    return {
        "layer": (f.name or "model", f.name),
        "outputs × inputs": (f"{blocks}{f.outputs:,} × {f.inputs:,}", f.dimension),
        "kind": (f.kind, ("dense", "index", "diagonal").index(f.kind)),
        "trace": (f"{f.trace:.3g}", f.trace),
        "condition": (number(f.condition), min(f.condition, 1e308)),
        "condition, damped": (number(f.condition_damped), min(f.condition_damped, 1e308)),
        "effective rank": (f"{f.effective_rank:,.1f}", f.effective_rank),
        "of all directions": (percent(f.share), f.share),
        "after diagonal scaling": (MISSING, -1) if scaled is None else (percent(scaled), scaled),
        "above damping": (percent(above), above),
        "statistics": (memory(f.bytes), f.bytes),
    }


def table(result: Inspection) -> list[list[str]]:
    """The head, then a row per layer."""
    rows = [cells(facts) for facts in result.layers]
    return [list(rows[0]), *([text for text, _ in row.values()] for row in rows)]


def short_layers(names: Sequence[str]) -> dict[str, str]:
    """The last parts of each dotted name that no other ends with, cropped in the middle."""
    endings = {}
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            ending = ".".join(parts[-count:])
            alike = [n for n in names if n == ending or n.endswith(f".{ending}")]
            # a number alone says too little
            if len(alike) == 1 and not ending.isdecimal():
                break
        half = (SHORT - 1) // 2
        cropped = ending if len(ending) <= SHORT else f"{ending[:half]}…{ending[-half:]}"
        endings[name] = cropped or "model"
    return endings


def spectra(result: Inspection, field: str) -> list[Plot]:
    """Eigenvalues in falling order, of as many layers to a plot as there are colours."""
    name, title, unit, text = SPECTRA[field]
    sides = field != "spectrum"
    layers = [f for f in result.layers if not sides or (f.output_spectrum and f.input_spectrum)]
    damping = None if sides else result.settings["damping"] or None
    short = short_layers([f.name for f in result.layers])
    count = -(-len(layers) // COLOURS)
    # parts of like size
    size = -(-len(layers) // count) if count else 0
    plots = []
    for i in range(count):
        lines = []
        for colour, f in enumerate(layers[i * size : (i + 1) * size], start=1):
            points = getattr(f, field)
            by = points[0][1] if sides else f.mean
            curve = [(place, float(f"{value / by:.4g}")) for place, value in points]
            lines.append(Line(f.name, colour % COLOURS, curve, beside=short[f.name]))
        values = [y for line in lines for _, y in line.points] + ([damping] if damping else [])
        low, high = (max(LOWEST, min(values)), max(values)) if values else (1.0, 1.0)
        margin = (high / low) ** 0.04 if high > low else 2.0
        place = f" ({i + 1} of {count})" if count > 1 else ""
        labels = (f"{name}-{i}", title + place, text, "number of the eigenvalue", unit)
        y_range = (low / margin, high * margin)
        plots.append(Plot(*labels, lines, y_range=y_range, goal=damping, empty=DEAD, **LOG))
    return plots


def conditions_by_damping(result: Inspection) -> Plot:
    """What is left of the condition number of the worst, the middle and the best layer."""
    ranked = sorted((f for f in result.layers if f.trace > 0), key=lambda f: f.peak)
    places = {"worst": -1, "median": len(ranked) // 2, "best": 0} if ranked else {}
    # few layers are drawn once, under the first of their names
    picked: dict[str, tuple[str, LayerFacts]] = {}
    for words, place in places.items():
        picked.setdefault(ranked[place].name, (words, ranked[place]))
    lines = []
    for colour, (words, facts) in zip((2, 1, 3), picked.values(), strict=False):
        points = [(m, facts.condition_at(m)) for m in (10 ** (k / 4) for k in range(-24, 5))]
        lines.append(Line(f"{words} ({facts.name})", colour, points, beside=words))
    text = "Condition number after damping, of layers by their largest over their mean eigenvalue."
    labels = ("damping", "Condition by damping", text, "damping / mean eigenvalue")
    return Plot(*labels, "condition number", lines, empty=DEAD, **LOG)


def ranks(result: Inspection) -> Dots:
    """Effective rank as a share of all directions, before and after diagonal scaling."""
    short = short_layers([f.name for f in result.layers])
    dots = []
    for f in result.layers:
        rank = f.effective_rank
        # 1.4 of 20, but 3 of 20 and 140 of 2,000
        digits = 1 if rank < 10 and not math.isclose(rank, round(rank), abs_tol=0.05) else 0
        text = f"{rank:,.{digits}f} of {f.dimension:,}"
        dots.append(Row(f.name, short[f.name], f.share, f.scaled_share, text))
    description = "; ".join(f"{row.label}: {row.text}" for row in dots)
    labels = ("ranks", "Effective rank by layer", description, "effective rank / dimension")
    return Dots(*labels, dots)


def memory_by_examples(result: Inspection) -> Plot:
    """All output sides under each policy, by the number of examples."""
    most = max(1e4, 4.0 * result.settings["examples"])
    counts = sorted({round(most ** (k / 60)) for k in range(61)})
    lines = []
    for policy, colour in (("none", 0), ("all", 2), ("auto", 1)):
        sizes = {n: sum(f.output_bytes(n, policy) for f in result.layers) for n in counts}
        if any(sizes.values()):
            lines.append(Line(policy, colour, [(n, size / 2**20) for n, size in sizes.items()]))
    text = "Memory of all output sides as covariances (none), gradients (all), or by choice (auto)."
    labels = ("memory", "Output sides by number of examples", text, "examples", "MiB")
    return Plot(*labels, lines, empty="no layer has sides", **LOG)
