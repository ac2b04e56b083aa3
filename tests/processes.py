"""Real processes for tests: R ranks on loopback with gloo, ended in any case when time is up.

To start a rank takes longer than most of what tests do with it, so ranks are kept, with their
process group, until one of them fails; those that are to die or to hang are started for one call.
"""

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from inspect import unwrap
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SECONDS = 120.0
Outcome = tuple[Any] | str | int | None

# forked from a server that has imported all this, a rank starts in a few milliseconds
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # every optimizer's constructor imports it
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "isokron.optim",
        "isokron.attribution",
        "isokron.cli",
        "pytest",  # as tests do
    ]
)


def run(
    ranks: int, function: Callable[..., Any], *args: Any, seconds: float = SECONDS
) -> list[Any]:
    """What `function(*args)` returned on every rank (plain data or tensors); a rank's error is
    raised here, and ranks that do not end are killed.

    `function` is called with a process group of all ranks, and must be importable. The ranks have
    run other functions before, and will run more: it must leave isokron as it was.
    """
    team = _kept.pop(ranks, None) or _Team(ranks)
    ended = team.call(function, args, seconds)
    errors = [
        f"rank {i}: {'no answer in time' if each is None else each}"
        for i, each in enumerate(ended)
        if not isinstance(each, tuple)
    ]
    if errors:
        team.end()
        raise AssertionError("\n".join(errors))
    _kept[ranks] = team
    return [each[0] for each in ended if isinstance(each, tuple)]


def outcomes(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = SECONDS,
    awaited: int | None = None,
) -> list[Outcome]:
    """Of every rank, in processes that do nothing else: (what it returned,), its traceback, the
    exit code of one that died, or None of one that was still running when time was up.

    Time is up too when the first `awaited` ranks have ended.
    """
    team = _Team(ranks)
    try:
        return team.call(function, args, seconds, awaited)
    finally:
        team.end()


class _Team:
    """Ranks that wait for something to do."""

    def __init__(self, ranks: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self.processes, self.pipes = [], []
        for rank in range(ranks):
            here, there = CONTEXT.Pipe()
            arguments = (rank, ranks, str(Path(self.folder.name) / "store"), there)
            process = CONTEXT.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        seconds: float,
        awaited: int | None = None,
    ) -> list[Outcome]:
        task = pickle.dumps((sys.path, function, args))
        found: dict[Connection, Outcome] = {}
        for pipe in self.pipes:
            try:
                pipe.send_bytes(task)
            except OSError:  # it is gone, as the end of what it says will tell
                continue
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            missing = [pipe for pipe in self.pipes if pipe not in found]
            if not set(missing) & set(self.pipes[:awaited]):
                break
            for pipe in wait(missing, left):
                try:
                    found[pipe] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    process = self.processes[self.pipes.index(pipe)]
                    process.join(10)
                    found[pipe] = process.exitcode
        return [found.get(pipe) for pipe in self.pipes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()
        self.folder.cleanup()


_kept: dict[int, _Team] = {}  # by the number of ranks


def _rank(rank: int, ranks: int, store: str, pipe: Connection) -> None:
    environment = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    environment |= {k: v for k, v in os.environ.items() if k not in environment}
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    gc.freeze()  # what has been imported need not be looked at again
    while True:
        try:
            sys.path[:], function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the tests are over
            os._exit(0)
        try:
            os.environ.clear()
            os.environ.update(environment)
            torch.set_num_threads(1)
            torch.manual_seed(0)
            before = _isokron()
            result = pickle.dumps((function(*args),))
            after = _isokron()
            changed = [name for name in before if after.get(name) is not before[name]]
            assert not changed, f"{function.__name__} left other values of {changed}"
            gc.collect()
            dist.barrier()  # nobody is in the middle of something when the next begins
            pipe.send_bytes(result)
        except BaseException:
            pipe.send_bytes(pickle.dumps(traceback.format_exc()))
            sys.stderr.flush()
            os._exit(1)  # whoever waits for this rank is told so by its end


def _isokron() -> dict[str, Any]:
    """All that the modules of isokron and their classes have, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "isokron":
            continue
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                own = dict(vars(value))
                if "step" in own:  # which torch wraps when the first optimizer of a class is made
                    own["step"] = unwrap(own["step"])
                found |= {f"{name}.{key}.{part}": each for part, each in own.items()}
    return found


@cache
def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """In a rank, the one mesh of this shape: torch takes two that look alike for the same, and
    may send what belongs to one over the groups of the other."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
