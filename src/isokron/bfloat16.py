"""Check in a child process whether this CPU can multiply bfloat16 matrices.

Some virtual machines report AMX instructions but do not permit them. oneDNN, which torch uses for
bfloat16 products on the CPU, then kills the process with an illegal instruction, unless an
environment variable limits it to AVX-512 before torch is imported. Nothing here imports torch or
changes the environment: callers set the variables of `bfloat16_environment`, or print them.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

REMEDY = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

# large enough for oneDNN's fast path
PRODUCT = "import torch; torch.ones(512, 2048).bfloat16() @ torch.ones(2048, 512).bfloat16()"


class Bfloat16Unusable(RuntimeError):
    """bfloat16 products kill the process, and the known remedy does not help."""


def product_survives(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a bfloat16 matrix product on the CPU succeeds with these variables added."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    # a positive code is Python's own exit: torch is missing or broken, the CPU was not tested
    if done.returncode > 0:
        raise RuntimeError(f"a bfloat16 product could not be tried:\n{done.stderr.strip()}")
    return done.returncode == 0


def bfloat16_environment() -> dict[str, str]:
    """Variables without which a bfloat16 product kills the process; empty on most machines.

    They take effect only in processes that have not imported torch yet. Raises Bfloat16Unusable if
    they do not help.
    """
    if product_survives():
        return {}
    if not product_survives(REMEDY):
        assignments = " ".join(f"{name}={value}" for name, value in REMEDY.items())
        raise Bfloat16Unusable(
            f"bfloat16 matrix products on the CPU end the process, with {assignments} too; "
            "use float32 on this machine"
        )
    return dict(REMEDY)
