"""`isokron info`: what is installed, and which code does the work on this machine."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from isokron._version import __version__

OPTIONAL = ("triton", "jax", "optax", "transformers")


def info() -> None:
    """Say which kernels are used on this machine, and why."""
    import torch

    from isokron.kernels.paths import paths
    from isokron.race.plan import machine

    installed = [f"isokron {__version__}", f"Python {platform.python_version()}"]
    installed.append(f"torch {torch.__version__}")
    versions = {name: _version_of(name) for name in OPTIONAL}
    installed += [f"{name} {version}" for name, version in versions.items() if version]
    typer.echo(", ".join(installed))
    capability = torch.backends.cpu.get_cpu_capability()
    typer.echo(f"{machine()}, {torch.get_num_threads()} threads, {capability}\n")
    rows = paths()
    wide = max(len(row.work) for row in rows)
    for row in rows:
        typer.echo(f"{row.work:<{wide}}  {row.device:<7} {row.by:<7} {row.why}")
    missing = [name for name, version in versions.items() if not version]
    if missing:
        typer.echo(f"\nNot installed, and not needed for training: {', '.join(missing)}.")


def _version_of(package: str) -> str | None:
    """The installed version of a package that may be missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
