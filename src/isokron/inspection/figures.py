"""Which curves of an inspection are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from isokron.inspection.memory import by_policy
from isokron.inspection.names import short_layers
from isokron.inspection.results import Inspection, LayerFacts, Points
from isokron.pages.dots import Dots, Row
from isokron.pages.plot import COLOURS, Line, Plot

LOWEST = 1e-7  # times the mean, and of a side times the largest: below is rounding of float32
EMPTY = "no curvature"


def groups(layers: Sequence[LayerFacts]) -> list[list[LayerFacts]]:
    """Consecutive layers, as many to a figure as there are colours, in parts of like size."""
    count = -(-len(layers) // COLOURS)
    size = -(-len(layers) // count) if count else 0
    return [list(layers[i * size : (i + 1) * size]) for i in range(count)]


def spectra(result: Inspection) -> list[Plot]:
    """All eigenvalues of every layer over their mean, in falling order."""
    damping = result.settings["damping"]
    described = (
        "Eigenvalues of every layer, divided by their mean, in falling order; the dotted line is "
        "the damping."
    )
    return [
        Plot(
            f"spectra-{i}",
            _numbered("All eigenvalues", i, groups(result.layers)),
            described,
            "number of the eigenvalue",
            "eigenvalue / mean",
            _lines(result, group, [_scaled(f.spectrum, f.mean) for f in group]),
            x_log=True,
            y_log=True,
            y_range=_heights([_scaled(f.spectrum, f.mean) for f in group], damping),
            goal=damping or None,
            empty=EMPTY,
        )
        for i, group in enumerate(groups(result.layers))
    ]


def side_spectra(result: Inspection) -> list[Plot]:
    """Of inputs (A) and of gradients of outputs (G), over their largest eigenvalue."""
    sides = [f for f in result.layers if f.output_spectrum and f.input_spectrum]
    found = []
    for i, group in enumerate(groups(sides)):
        for key, words in (("input", "inputs, A"), ("output", "output gradients, G")):
            curves: list[Points] = [getattr(f, f"{key}_spectrum") for f in group]
            points = [_scaled(curve, curve[0][1]) for curve in curves]
            found.append(
                Plot(
                    f"{key}-{i}",
                    _numbered(f"Side of the {words}", i, groups(sides)),
                    f"Eigenvalues of the covariance of {words}, divided by the largest.",
                    "number of the eigenvalue",
                    "eigenvalue / largest",
                    _lines(result, group, points),
                    x_log=True,
                    y_log=True,
                    y_range=_heights(points, 1.0),
                    empty=EMPTY,
                )
            )
    return found


def conditions_by_damping(result: Inspection) -> Plot:
    """What is left of the condition number of the worst, the middle and the best layer."""
    ranked = sorted((f for f in result.layers if f.trace > 0), key=lambda f: f.largest / f.mean)
    picked: dict[str, tuple[str, LayerFacts]] = {}
    for words, place in (("worst", -1), ("median", len(ranked) // 2), ("best", 0)):
        if ranked:
            picked.setdefault(ranked[place].name, (words, ranked[place]))
    multiples = [10 ** (k / 4) for k in range(-24, 5)]
    lines = [
        Line(
            f"{words} ({facts.name})",
            colour,
            [(m, damped_condition(facts, m)) for m in multiples],
            beside=words,
        )
        for colour, (words, facts) in zip((2, 1, 3), picked.values(), strict=False)
    ]
    return Plot(
        "damping",
        "Condition by damping",
        "Condition number after adding a multiple of the mean eigenvalue, for the layers with the "
        "largest, the median and the smallest ratio of largest to mean eigenvalue.",
        "damping / mean eigenvalue",
        "condition number",
        lines,
        x_log=True,
        y_log=True,
        empty=EMPTY,
    )


def damped_condition(facts: LayerFacts, multiple: float) -> float:
    """(λ_max + m λ̄) / (λ_min + m λ̄)"""
    added = multiple * facts.mean
    return (facts.largest + added) / (facts.smallest + added)


def ranks(result: Inspection) -> Dots:
    """Effective rank as a share of all directions, before and after diagonal scaling."""
    names = short_layers([f.name for f in result.layers])
    rows = [
        Row(f.name, names[f.name], f.share, f.scaled_share, _of(f.effective_rank, f.dimension))
        for f in result.layers
    ]
    return Dots(
        "ranks",
        "Effective rank by layer",
        "; ".join(f"{row.label}: {row.text}" for row in rows),
        "effective rank / dimension",
        rows,
    )


def memory_by_examples(result: Inspection) -> Plot:
    """All output sides under each policy, by the number of examples."""
    most = max(1e4, 4.0 * result.settings["examples"])
    counts = sorted({round(most ** (k / 60)) for k in range(61)})
    styles = {"none": 0, "all": 2, "auto": 1}
    table = {count: {p.policy: p for p in by_policy(result.layers, count)} for count in counts}
    mebibyte = 2.0**20
    lines = [
        Line(policy, colour, [(n, row[policy].outputs / mebibyte) for n, row in table.items()])
        for policy, colour in styles.items()
        if any(row[policy].outputs for row in table.values())
    ]
    return Plot(
        "memory",
        "Output sides by number of examples",
        "Memory of all output sides as covariances (none), as gradients (all), and as whichever "
        "policy auto chooses for each layer.",
        "examples",
        "MiB",
        lines,
        x_log=True,
        y_log=True,
        empty="no layer has sides",
    )


def _lines(
    result: Inspection, group: list[LayerFacts], curves: Sequence[Sequence[tuple[float, float]]]
) -> list[Line]:
    names = short_layers([f.name for f in result.layers])
    return [
        Line(facts.name, (i + 1) % COLOURS, points, beside=names[facts.name])
        for i, (facts, points) in enumerate(zip(group, curves, strict=True))
    ]


def _scaled(points: Points, unit: float) -> list[tuple[float, float]]:
    return [(number, float(f"{value / unit:.4g}")) for number, value in points]


def _heights(
    curves: Sequence[Sequence[tuple[float, float]]], shown: float
) -> tuple[float, float] | None:
    """From the smallest eigenvalue that means something to the largest, and what must be seen."""
    values = [value for curve in curves for _, value in curve] + ([shown] if shown else [])
    if not values:
        return None
    low, high = max(LOWEST, min(values)), max(values)
    margin = (high / low) ** 0.04 if high > low else 2.0
    return low / margin, high * margin


def _numbered(title: str, i: int, parts: Sequence[object]) -> str:
    return title if len(parts) == 1 else f"{title} ({i + 1} of {len(parts)})"


def _of(rank: float, dimension: int) -> str:
    digits = 1 if rank < 10 and not math.isclose(rank, round(rank), abs_tol=0.05) else 0
    return f"{rank:,.{digits}f} of {dimension:,}"
