"""How fast refreshes are: measured here in a second, or as the user says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from isokron.distributed.ownership import REFRESH

SIDE, MATRICES, SECONDS = 256, 4, 0.4


@dataclass(frozen=True)
class Speed:
    """Flops a second of products, and of decompositions of which a d×d one counts 10·d³; and where
    the numbers are from."""

    products: float
    decompositions: float
    about: str


def given_speed(products: float, decompositions: float) -> Speed:
    """As the user says, in TFLOP/s."""
    for name, value in (("flops", products), ("eigh_flops", decompositions)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number of TFLOP/s, got {value}")
    return Speed(products * 1e12, decompositions * 1e12, "as given")


def measured_speed() -> Speed:
    """Of products and eigendecompositions of 256×256 in float32, in about a second."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(MATRICES, SIDE, SIDE, generator=generator)
    gram = factor @ factor.mT
    products = MATRICES * 2 * SIDE**3 / _median_time(lambda: gram @ factor)
    slower = MATRICES * REFRESH * SIDE**3 / _median_time(lambda: torch.linalg.eigh(gram))
    return Speed(products, slower, f"measured here on {SIDE}×{SIDE} in float32")


def _median_time(work: Callable[[], object]) -> float:
    work()
    taken: list[float] = []
    while sum(taken) < SECONDS or len(taken) < 3:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
