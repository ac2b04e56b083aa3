"""Which code does the work here, and why: what `isokron info` prints."""

from typing import NamedTuple

import torch

from isokron.kernels.adamw_native import status
from isokron.kernels.trust import CHECKS, trusted

WORK = {"adamw": "AdamW", "symmetric": "symmetric products"}


class PathTaken(NamedTuple):
    """One kind of work on one device: by what code it is done, and why by that."""

    work: str
    device: str
    by: str
    why: str


def paths() -> list[PathTaken]:
    """Builds and checks what has not been built and checked yet."""
    found = [
        PathTaken("AdamW", "cpu", *status()),
        PathTaken("symmetric products", "cpu", "torch", "by halves where matrices are large"),
    ]
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        for name in CHECKS:
            usable, why = trusted(name, device)
            found.append(PathTaken(WORK[name], str(device), "triton" if usable else "torch", why))
    if not devices:
        found.append(PathTaken("AdamW, products", "cuda", "unused", "torch sees no CUDA device"))
    return found
