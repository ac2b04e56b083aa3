"""`isokron info`: what is installed, and which code does the work on this machine."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from isokron._version import __version__

OPTIONAL = ("triton", "jax", "optax", "transformers")
TRITON_WORK = {"adamw": "AdamW", "symmetric": "symmetric products"}


def info() -> None:
    """Say which code does the work on this machine, and why."""
    import torch

    from isokron.race.plan import machine

    installed = [f"isokron {__version__}", f"Python {platform.python_version()}"]
    installed.append(f"torch {torch.__version__}")
    versions = {name: _version_of(name) for name in OPTIONAL}
    installed += [f"{name} {version}" for name, version in versions.items() if version]
    typer.echo(", ".join(installed))
    capability = torch.backends.cpu.get_cpu_capability()
    typer.echo(f"{machine()}, {torch.get_num_threads()} threads, {capability}\n")
    for work, device, code, why in _paths():
        typer.echo(f"{work:<18}  {device:<7} {code:<7} {why}")
    missing = [name for name, version in versions.items() if not version]
    if missing:
        typer.echo(f"\nNot installed, and not needed for training: {', '.join(missing)}.")


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
        missing = bfloat16_environment()
    except Bfloat16Unusable as error:
        return "broken", str(error)
    if not missing:
        return "torch", "tried in a child process"
    assignments = " ".join(f"{name}={value}" for name, value in missing.items())
    return "broken", f"they end the process; set {assignments} before Python starts"


def _version_of(package: str) -> str | None:
    """The installed version of a package that may be missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
