"""The layers as rows of text, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isokron.inspection.memory import POLICIES, PolicyBytes, by_policy, input_bytes, output_bytes
from isokron.inspection.results import Inspection, LayerFacts
from isokron.inspection.verdict import number, percent
from isokron.pages.numbers import memory

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "layer",
    "outputs × inputs",
    "kind",
    "trace",
    "condition",
    "condition, damped",
    "effective rank",
    "of all directions",
    "after diagonal scaling",
    "above damping",
    "statistics",
)
# in the order in which a narrow terminal gives them up
LEAST_NEEDED = ("kind", "trace", "condition", "above damping", "statistics", "outputs × inputs")
TOTALS = (
    "policy",
    "layers kept as gradients",
    "output sides",
    "with gradients in bfloat16",
    "with input sides",
    "of the model",
    "of AdamW's two states",
)
NONE = "–"
ROUNDING = 1e-7  # of float32


def rows(result: Inspection) -> list[list[str]]:
    """One row per layer, cells as in COLUMNS."""
    return [
        [
            f.name or "model",
            ("" if f.blocks == 1 else f"{f.blocks} × ") + f"{f.outputs:,} × {f.inputs:,}",
            f.kind,
            f"{f.trace:.3g}",
            number(f.condition),
            number(f.condition_damped),
            f"{f.effective_rank:,.1f}",
            percent(f.share),
            NONE if f.scaled_share is None else percent(f.scaled_share),
            percent(f.kept / f.dimension),
            memory(f.bytes),
        ]
        for f in result.layers
    ]


def keys(result: Inspection) -> list[list[float | str]]:
    """What the rows are sorted by."""
    return [
        [
            f.name,
            f.dimension,
            ("dense", "index", "diagonal").index(f.kind),
            f.trace,
            min(f.condition, 1e308),
            min(f.condition_damped, 1e308),
            f.effective_rank,
            f.share,
            -1.0 if f.scaled_share is None else f.scaled_share,
            f.kept / f.dimension,
            f.bytes,
        ]
        for f in result.layers
    ]


def policy_rows(result: Inspection) -> list[list[str]]:
    """Totals by policy, cells as in TOTALS."""

    def row(found: PolicyBytes) -> list[str]:
        return [
            found.policy,
            str(found.gradients),
            memory(found.outputs),
            memory(found.outputs_half),
            memory(found.total),
            f"{found.total / result.model_bytes:.2f}×",
            f"{found.total / (2 * result.model_bytes):.2f}×",
        ]

    return [row(found) for found in by_policy(result.layers, result.settings["examples"])]


def layer_memory_rows(result: Inspection) -> list[list[str]]:
    """Per layer: its output side under every policy, and its input side."""
    return [
        [
            f.name or "model",
            *(_side(f, result.settings["examples"], policy) for policy in POLICIES),
            memory(input_bytes(f)),
        ]
        for f in result.layers
    ]


def _side(facts: LayerFacts, examples: int, policy: str) -> str:
    return NONE if facts.kind == "diagonal" else memory(output_bytes(facts, examples, policy))


def notes(result: Inspection) -> list[str]:
    """What a reader must know to read the table rightly."""
    damping = result.settings["damping"]
    lines = [
        f"Damped: {damping:g} × the layer's mean eigenvalue is added to all. Above damping: the "
        "share of directions whose eigenvalue is larger; all others are treated alike.",
        "Effective rank: exp of the entropy of the eigenvalues.",
    ]
    if any(f.scaled_rank is not None for f in result.layers):
        lines.append(
            "After diagonal scaling: the effective rank, of all directions, when every weight has "
            "been scaled to curvature 1, as a diagonal preconditioner does at best; the Kronecker "
            "inverse would make it 100 %."
        )
    if any(map(_rounded, result.layers)):
        lines.append(
            "Eigenvalues of a side below about 1e-7 of its largest are rounding of float32, and so "
            "are the largest condition numbers; infinite means that one is 0. Compare the damped."
        )
    return [*lines, *result.notes]


def _rounded(facts: LayerFacts) -> bool:
    """Whether the smallest eigenvalue is below what float32 can tell from 0."""
    sides = (facts.output_spectrum, facts.input_spectrum)
    small = any(side and side[-1][1] < ROUNDING * side[0][1] for side in sides)
    return small or facts.condition > ROUNDING**-2


def rich_table(result: Inspection, width: int) -> Table:
    """For the terminal; where it is narrow, without the columns least needed."""
    from rich.table import Table
    from rich.text import Text

    cells = [list(COLUMNS), *rows(result)]
    gone = list(LEAST_NEEDED)
    while (natural := _natural(cells)) >= width and gone:
        place = cells[0].index(gone.pop(0))
        cells = [row[:place] + row[place + 1 :] for row in cells]
    s = result.settings
    title = f"{s['task']}, {s['method']}, {s['examples']:,} examples"
    table = Table(title=Text(title), title_justify="left")
    for i, column in enumerate(zip(*cells, strict=True)):
        table.add_column(
            Text(column[0]),
            justify="left" if i == 0 else "right",
            overflow="fold",
            vertical="bottom",
            min_width=None if natural >= width else _least(column),
        )
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    return table


def _natural(cells: list[list[str]]) -> int:
    """Width of the table with its columns as narrow as they can be."""
    return 1 + sum(_least(column) + 3 for column in zip(*cells, strict=True))


def _least(column: Sequence[str]) -> int:
    """Heads may break between words, and cells not at all."""
    return max(*map(len, column[0].split()), *map(len, column[1:]))
