"""Whether this CPU can multiply bfloat16 matrices, found out in a child process.

Some virtual machines announce AMX instructions and do not permit them. oneDNN, which torch uses for
bfloat16 products on the CPU, then ends the process with an illegal instruction, unless it is told
before torch is imported to use nothing beyond AVX-512. Nothing here imports torch or changes the
environment: callers set what `bfloat16_environment` returns, or print it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

REMEDY = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

# large enough that oneDNN takes its fast path
PRODUCT = "import torch; torch.ones(512, 2048).bfloat16() @ torch.ones(2048, 512).bfloat16()"


class Bfloat16Unusable(RuntimeError):
    """bfloat16 products end the process, and the known remedy does not help."""


def product_survives(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a bfloat16 matrix product on the CPU ends well, with these variables added."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode > 0:  # Python ended by itself: torch is missing or broken, not the CPU
        raise RuntimeError(f"a bfloat16 product could not be tried:\n{done.stderr.strip()}")
    return done.returncode == 0


def bfloat16_environment() -> dict[str, str]:
    """Variables without which a bfloat16 product ends the process; none on most machines.

    They take effect only in processes that have not imported torch yet. Raises Bfloat16Unusable
    where they do not help.
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
