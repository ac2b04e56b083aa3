"""A thread pool that decomposes the matrices of a CPU batch in parallel, one core per matrix.

torch works through a batch one matrix after the other, and a LAPACK decomposition of a few hundred
rows hardly gains from a second core. Results do not depend on which thread took which matrix.
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

# Smaller matrices are faster as one batched call.
MIN_ROWS = 192
# A larger matrix keeps all cores busy by itself.
MAX_ROWS = 1536


def worth_threads(batch: Tensor) -> bool:
    """Whether to decompose the matrices of a batch one by one with `map_matrices`. [B, n, n]"""
    return batch.device.type == "cpu" and batch.ndim == 3 and batch.size(-1) >= MIN_ROWS


def map_matrices(function: Callable[..., T], *batches: Tensor) -> list[T]:
    """function(matrix, …) for corresponding matrices of the batches, in order. [B, n, n]"""
    cores = torch.get_num_threads()
    parallel = len(batches[0]) > 1 and batches[0].size(-1) <= MAX_ROWS and cores > 1
    mapper = _pool(cores, os.getpid()).map if parallel and _thread_limits() else map
    return list(mapper(function, *[batch.unbind() for batch in batches]))


@functools.cache
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """A pool per process, because a fork does not inherit its parent's threads."""
    return ThreadPoolExecutor(workers, "isokron-linalg", initializer=compute_alone)


def compute_alone() -> None:
    """Limit the calling thread to one core in OpenMP and MKL; other threads are not affected.

    With more OpenMP threads than cores, all of them sleep between loops, including those of the
    training step.
    """
    torch.get_num_threads()  # initializes the thread now, so that torch does not reset the limits
    for set_limit in _thread_limits():
        set_limit(1)


@functools.cache
def _thread_limits() -> tuple[Callable[[int], object], ...]:
    """Functions that set OpenMP's and MKL's core count for the calling thread; () without MKL."""
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    try:
        # from torch's own library: another OpenMP runtime does not know torch's threads
        path = next((Path(torch.__file__).parent / "lib").glob("*torch_cpu.*"))
        library = ctypes.CDLL(str(path))
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    except (StopIteration, OSError, AttributeError):
        return ()
    return tuple(ctypes.CFUNCTYPE(None, ctypes.c_int)(a) for a in addresses if a is not None)
