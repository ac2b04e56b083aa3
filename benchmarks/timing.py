"""Interleaved medians: on shared cores, only a ratio taken in one run means something."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


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


def machine() -> str:
    """The processor, threads and torch version a figure was taken with."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0].split(":", 1)[1].strip() if models else name
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )
