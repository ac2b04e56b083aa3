"""Interleaved medians: on shared cores, only a ratio taken in one run means something."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping

from isokron.bfloat16 import bfloat16_environment
from isokron.race.race import machine


def restart_for_bfloat16() -> None:
    """Start this script anew with what bfloat16 products need on this CPU, if anything.

    Called before any work: the variables count only if they are set before torch is imported.
    """
    missing = bfloat16_environment()
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})


def interleaved(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 5
) -> dict[str, float]:
    """Median seconds of each, the contestants taking turns so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def conditions() -> str:
    """The machine, threads and torch version a figure was taken with."""
    try:
        import torch  # not above: what JAX does is timed where there is no torch
    except ImportError:
        return machine()
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {capability}"
    )
