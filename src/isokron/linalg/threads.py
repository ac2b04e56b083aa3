"""Decompositions of a batch, several at a time, each on one core.

A LAPACK decomposition of a few hundred rows hardly gains from a second core, but two of them do.
torch works through a batch one matrix after the other, so on the CPU a pool of threads takes it,
each of them told to compute on its own: the results do not depend on who took which matrix.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Matrices of so many rows are worth a turn each: smaller ones are quicker as one batch.
LARGE = 192
# Beyond, one matrix keeps all cores busy.
HUGE = 1536


def singly(batch: Tensor) -> bool:
    """Whether to take the matrices of a batch one by one, by `each`. [B, n, n]"""
    return batch.device.type == "cpu" and batch.ndim == 3 and batch.size(-1) >= LARGE


def each(function: Callable[..., T], *batches: Tensor) -> list[T]:
    """function(matrix, …) of the matrices of all batches, in their order. [B, n, n]"""
    cores = torch.get_num_threads()
    spread = len(batches[0]) > 1 and batches[0].size(-1) <= HUGE and cores > 1 and _limits()
    mapped = _pool(cores, os.getpid()).map if spread else map
    return list(mapped(function, *[batch.unbind() for batch in batches]))


@functools.cache
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """One a process, since a fork has none of its parent's threads."""
    return ThreadPoolExecutor(workers, "isokron-linalg", initializer=compute_alone)


def compute_alone() -> None:
    """One core for what the calling thread computes, whatever the other threads do.

    A team of helpers of its own would do worse than waste time: with more threads than cores,
    OpenMP lets all of them sleep between loops, those of the training step too.
    """
    torch.get_num_threads()  # makes torch set the thread up now, and not over what follows
    for limit in _limits():
        limit(1)


@functools.cache
def _limits() -> tuple[Callable[[int], object], ...]:
    """What sets OpenMP's and MKL's number of cores for the calling thread; () without MKL.

    Looked up in torch's own CPU library: another OpenMP runtime would not know torch's threads.
    """
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    try:
        path = next((Path(torch.__file__).parent / "lib").glob("*torch_cpu.*"))
        library = ctypes.CDLL(str(path))
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    except (StopIteration, OSError, AttributeError):
        return ()
    return tuple(ctypes.CFUNCTYPE(None, ctypes.c_int)(a) for a in addresses if a is not None)
