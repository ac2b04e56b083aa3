"""`isokron build`: the gradient store of a run."""

from __future__ import annotations

from dataclasses import replace

import typer

from isokron.cli import options as o
from isokron.cli.errors import reported
from isokron.cli.sources import open_run
from isokron.cli.watching import Stages, watched


def build(
    run: o.RunFolder,
    dim: o.Dim = None,
    projection: o.Projection = "rademacher",
    scope: o.Scope = "layer",
    plain: o.Plain = False,
    damping: o.Damping = 0.1,
    dtype: o.Dtype = "float32",
    tokens: o.Tokens = False,
    memory: o.Memory = None,
) -> None:
    """Store the gradients of all training examples, to answer queries without the data.

    A build that was stopped goes on where it was with the same command.

    Example:

      isokron build runs/digits --dim 16 --dtype bfloat16
    """
    with reported(2):
        from isokron.attribution import Build

        budget = o.bytes_of(memory)
        # checked before the model is loaded
        settings = Build(dim or None, projection, "layer", 0, not plain, damping, dtype, tokens)
        with watched() as watcher:
            opened = open_run(run, watcher)
        settings = replace(settings, dim=o.dim_of(dim, opened), scope=scope)
    with reported(1):
        from isokron.attribution import build as building

        with watched() as watcher:
            store = building(opened, settings, Stages(watcher), budget)
        size = len(store) * store.width * store.dtype.itemsize
        typer.echo(
            f"Gradients of {store.examples:,} examples, {len(store):,} rows of {store.width:,}, "
            f"{size / 2**20:.1f} MiB: {opened.gradients}"
        )
