"""Real processes for tests: R ranks on loopback with gloo, ended in any case when time is up."""

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

SECONDS = 120.0
# forked from a server that has imported all this, a rank starts in a few milliseconds
_PRELOADED = [
    "torch",
    "torch._dynamo",  # every optimizer's constructor imports it
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "isokron.optim",
]


def run(
    ranks: int, function: Callable[..., Any], *args: Any, folder: Path, seconds: float = SECONDS
) -> list[Any]:
    """What `function(*args)` returned on every rank (plain data or tensors); a rank's error is
    raised here, and ranks that do not end are killed.

    `function` is called with a process group of all ranks, and must be importable.
    """
    ended = outcomes(ranks, function, *args, folder=folder, seconds=seconds)
    errors = [f"rank {i}: {each}" for i, each in enumerate(ended) if isinstance(each, str)]
    if errors:
        raise AssertionError("\n".join(errors))
    return [each[0] for each in ended if isinstance(each, tuple)]


def outcomes(
    ranks: int, function: Callable[..., Any], *args: Any, folder: Path, seconds: float = SECONDS
) -> list[tuple[Any] | str | int | None]:
    """Of every rank: (what it returned,), its traceback, the exit code of one that died, or None of
    one that was still running when time was up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"store-{time.monotonic_ns()}"
    results: Any = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, str(store), results, function, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + seconds
    while len(found) < ranks and time.monotonic() < end:
        try:
            rank, result = results.get(timeout=0.1)
            found[rank] = torch.load(result) if isinstance(result, Path) else result
        except queue.Empty:
            dead = [p.exitcode is not None and p.exitcode != 0 for p in processes]
            if all(gone or i in found for i, gone in enumerate(dead)):
                break
    for process in processes:
        process.join(max(0.0, min(5.0, end - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    late = -9  # of those killed above
    return [
        found.get(i, None if code in (0, late) and time.monotonic() >= end else code)
        for i, code in enumerate(codes)
    ]


def _rank(
    rank: int,
    ranks: int,
    store: str,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        result = function(*args)
        path = Path(f"{store}.{rank}")
        torch.save((result,), path)
        dist.barrier()  # without it, gloo has been seen to abort at the end
        results.put((rank, path))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        dist.destroy_process_group()
