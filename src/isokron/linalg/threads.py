"""Decompositions of a batch, several at a time, each on one core.

A LAPACK decomposition of a few hundred rows hardly gains from a second core, but two of them do.
torch works through a batch one matrix after the other, so on the CPU a pool of threads takes it,
each of them told to compute on its own: the results do not depend on who took which matrix.
"""

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# below, starting a thread costs more than it saves; above, one matrix keeps all cores busy
SMALLEST, LARGEST = 192, 1536


def each(function: Callable[[Tensor], T], batch: Tensor) -> list[T]:
    """function(matrix) of every matrix of the batch, in its order. [B, n, n]"""
    matrices = batch.unbind()
    pool = _pool(torch.get_num_threads()) if worthwhile(batch) else None
    return list(pool.map(function, matrices) if pool else map(function, matrices))


def worthwhile(batch: Tensor) -> bool:
    """Whether several matrices at a time are faster than one after the other."""
    return (
        batch.device.type == "cpu"
        and batch.ndim == 3
        and len(batch) > 1
        and SMALLEST <= batch.size(-1) <= LARGEST
        and torch.get_num_threads() > 1
        and _limits() is not None
    )


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "isokron-linalg", initializer=compute_alone)


def compute_alone() -> None:
    """One core for what the calling thread computes, whatever the other threads do.

    A team of helpers of its own would do worse than waste time: with more threads than cores,
    OpenMP lets all of them sleep between loops, those of the training step too.
    """
    torch.get_num_threads()  # makes torch set the thread up now, and not over what follows
    limits = _limits()
    for limit in limits or ():
        limit(1)


@functools.cache
def _limits() -> tuple[Callable[[int], object], ...] | None:
    """OpenMP's and MKL's number of cores for the calling thread; None where torch has no MKL."""
    libraries = Path(torch.__file__).parent / "lib"
    try:
        openmp = ctypes.CDLL(str(next(libraries.glob("libgomp*"))))
        torch_cpu = ctypes.CDLL(str(next(libraries.glob("*torch_cpu.*"))))
        return openmp.omp_set_num_threads, torch_cpu.MKL_Set_Num_Threads_Local
    except (StopIteration, OSError, AttributeError):
        return None
