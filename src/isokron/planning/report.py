"""The figures of a plan: one row an optimizer, as a table for a terminal and as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isokron.planning.layouts import Layout
from isokron.planning.load import Load
from isokron.planning.speed import Speed

if TYPE_CHECKING:
    from rich.table import Table

WORDS = {
    "ddp": "whole parameters on every rank (ddp)",
    "fsdp": "parameters sharded over all ranks (fsdp)",
    "hsdp": "parameters sharded over {size} ranks, {copies} such copies (hsdp)",
}
NOTES = (
    "state: memory of the optimizer, mean and worst over ranks; of AdamW: the worst as a share of "
    "the first line. sent: to other ranks in a step, beside the reduction of gradients, which is "
    "the same for all. refresh: time a step of making operators anew, averaged over the steps "
    "between; of Muon, of its polar factors. owners: ranks that own blocks; the others wait."
)


@dataclass(frozen=True)
class Row:
    """One optimizer: mean and worst over ranks. Bytes, seconds a step, ranks."""

    optimizer: str
    state_mean: float
    state_worst: int
    of_adamw: float
    sent_mean: float
    sent_worst: int
    refresh_mean: float
    refresh_worst: float
    owners: int


@dataclass(frozen=True)
class Report:
    """All rows of a plan, and what they are of."""

    model: str
    parameters: int
    tensors: int
    dtype: str
    layout: Layout
    speed: Speed
    rows: list[Row]


def make_row(name: str, load: Load, layout: Layout, speed: Speed, yardstick: int) -> Row:
    """`yardstick`: the state of AdamW that every rank keeps whole."""
    copies = layout.ranks // layout.size
    refresh = load.refresh_seconds(speed)
    worst = int(load.state.max())
    return Row(
        name,
        float(load.state.mean()),
        worst,
        worst / yardstick,
        float(load.sent.mean()),
        int(load.sent.max()),
        float(refresh.mean()),
        float(refresh.max()),
        int(np.count_nonzero(load.blocks)) * copies,
    )


def as_json(report: Report) -> dict[str, Any]:
    """Plain data."""
    layout = report.layout
    return {
        "model": report.model,
        "parameters": report.parameters,
        "tensors": report.tensors,
        "dtype": report.dtype,
        "layout": layout.kind,
        "ranks": layout.ranks,
        "shard": layout.size,
        "communication": None
        if layout.communication is None
        else str(layout.communication).removeprefix("torch."),
        "product_flops": report.speed.products,
        "eigh_flops": report.speed.decompositions,
        "speed": report.speed.about,
        "optimizers": [asdict(row) for row in report.rows],
    }


def heading(report: Report) -> list[str]:
    """What the table is of, in two lines."""
    layout = report.layout
    words = WORDS[layout.kind].format(size=layout.size, copies=layout.ranks // layout.size)
    plural = "s" if layout.ranks > 1 else ""
    return [
        f"{report.model}: {report.parameters:,} parameters in {report.tensors:,} tensors of "
        f"{report.dtype}",
        f"{layout.ranks:,} rank{plural}, {words}",
    ]


def notes(report: Report) -> list[str]:
    """How to read it."""
    speed = report.speed
    products, slower = speed.products / 1e12, speed.decompositions / 1e12
    estimate = f"products at {products:.3g} TFLOP/s and decompositions at {slower:.3g}"
    return [f"Times are estimates: {estimate}, {speed.about}.", NOTES]


def rich_table(report: Report) -> Table:
    """At most 100 columns wide."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("optimizer", no_wrap=True, overflow="ellipsis", max_width=26)
    for name in ("state", "worst", "of AdamW", "sent", "worst", "refresh", "worst", "owners"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(
            row.optimizer,
            in_bytes(row.state_mean),
            in_bytes(row.state_worst),
            f"{100 * row.of_adamw:.3g} %",
            in_bytes(row.sent_mean),
            in_bytes(row.sent_worst),
            in_seconds(row.refresh_mean),
            in_seconds(row.refresh_worst),
            f"{row.owners:,}" if row.owners else "–",
        )
    return table


def in_bytes(number: float) -> str:
    """'1.23 GB'; a dash for nothing."""
    if not number:
        return "–"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"


def in_seconds(seconds: float) -> str:
    """'12 ms'; a dash for nothing."""
    if not seconds:
        return "–"
    units = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"))
    most = {"µs": 999.5, "ms": 999.5, "s": 99.95, "min": 99.95}
    scale, unit = next((s, u) for s, u in units if seconds / s < most.get(u, float("inf")))
    return f"{seconds / scale:.3g} {unit}"
