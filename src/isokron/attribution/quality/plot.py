"""The quality of a run at a glance: rank correlations, by p and with retrained models."""

from collections.abc import Mapping

from isokron.pages.plot import Line, Mark, Plot

YARDSTICK = "gradients"  # scores without curvature, grey


def quality_plot(
    task: str, compression: Mapping[str, Mapping[int, float]], lds: Mapping[str, float]
) -> Plot:
    """`compression`: way → p → ρ with scores that are not projected, a curve each. `lds`: method →
    linear datamodelling score, a level each."""
    dims = sorted({p for each in compression.values() for p in each}) or [1]
    ends = (float(dims[0]), float(dims[-1] if len(dims) > 1 else 2 * dims[0]))
    lines, marks = [], []
    for colour, (name, each) in enumerate(compression.items(), 1):
        points = [(float(p), each[p]) for p in sorted(each)]
        lines.append(Line(f"{name} projection, with exact scores", colour, points, beside=name))
        marks += [Mark(colour, x, y, f"{name}, p = {x:.0f}: {y:.3f}") for x, y in points]
    colour = len(compression) + 1
    for name, value in lds.items():
        own = 0 if name == YARDSTICK else colour
        colour += name != YARDSTICK
        level = [(x, value) for x in ends]
        short = name.partition(",")[0]
        lines.append(Line(f"LDS of {name}: {value:.3f}", own, level, beside=f"LDS {short}"))
    said = [
        f"{name} projection at p = {p}: {v:.2f}"
        for name, e in compression.items()
        for p, v in e.items()
    ]
    said += [f"LDS of {name}: {value:.2f}" for name, value in lds.items()]
    lowest = min([0.0, *lds.values(), *(v for each in compression.values() for v in each.values())])
    return Plot(
        name="quality",
        title=f"Rank correlations of scores on {task}",
        description="; ".join(said),
        x_label="p of the projection",
        y_label="Spearman's ρ",
        lines=lines,
        marks=marks,
        x_log=True,
        y_range=(lowest, 1.0),
    )
