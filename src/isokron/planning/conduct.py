"""A model, some optimizers and a layout → a report."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from isokron.optim import AdamW, Preconditioned
from isokron.optim.routing import param_groups
from isokron.planning.layouts import Layout
from isokron.planning.load import load_of
from isokron.planning.report import Report, make_row
from isokron.planning.speed import Speed

YARDSTICK = "adamw, on every rank"


def check_optimizer(spec: str, optimizer: object) -> Preconditioned:
    """One whose state can be divided."""
    if isinstance(optimizer, Preconditioned):
        return optimizer
    raise ValueError(
        f"optimizer {spec!r} does not divide its state over ranks, and cannot be planned; take one "
        "of isokron's, such as soap"
    )


def make_report(
    name: str,
    model: nn.Module,
    optimizers: Mapping[str, Preconditioned],
    layout: Layout,
    speed: Speed,
) -> Report:
    """One row an optimizer, of this model, after AdamW that every rank has whole."""
    params = list(model.parameters())
    everywhere = layout.alone()
    alone = load_of(AdamW(param_groups(model)), everywhere)
    whole = int(alone.state.max())
    rows = [make_row(YARDSTICK, alone, everywhere, speed, whole)]
    for spec, optimizer in optimizers.items():
        shown = "adamw, sharded" if spec == "adamw" else spec
        rows.append(make_row(shown, load_of(optimizer, layout), layout, speed, whole))
    count = sum(param.numel() for param in params)
    dtype = str(params[0].dtype).removeprefix("torch.")
    return Report(name, count, len(params), dtype, layout, speed, rows)
