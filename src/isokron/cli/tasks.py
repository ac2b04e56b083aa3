"""`isokron tasks`: what can be trained without writing code."""

from __future__ import annotations

import typer


def tasks() -> None:
    """List the built-in tasks."""
    from isokron.tasks.catalog import BUILT_IN

    for name, listing in BUILT_IN.items():
        size = f"{listing.parameters:>9,} parameters {listing.train:>9,} examples"
        typer.echo(f"{name:<15}{size}   {listing.about}")
    typer.echo('\nTheir data are in packages: pip install "isokron[tasks]"')
