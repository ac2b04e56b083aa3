"""The processes there are, and how one asks to be one of those that share."""

from collections import Counter
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import distributed as dist

from isokron.distributed.ranks import TIMEOUT, Gone, Ranks

_controls: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_made: Counter[tuple[int, ...]] = Counter()  # groups of some processes, by their members


def ranks_of(group: Any = None, timeout: float = TIMEOUT) -> Ranks:
    """The ranks of a process group, by default of all processes; `timeout`: seconds they wait."""
    if isinstance(group, Ranks):
        return group
    if process_count() == 0:
        raise RuntimeError(
            "there is no process group to share work in; call "
            "torch.distributed.init_process_group() first, as scripts under torchrun do"
        )
    chosen = dist.group.WORLD if group is None else group
    if isinstance(chosen, int) or (
        isinstance(chosen, dist.ProcessGroup) and dist.get_rank(chosen) < 0
    ):
        raise ValueError(
            f"group: this process (rank {dist.get_rank()}) is not in it; pass a group only on the "
            "ranks that are"
        )
    if not isinstance(chosen, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, got {type(chosen).__name__}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    return Ranks(chosen, timeout)


def beside(ranks: Ranks) -> Ranks:
    """The same ranks over connections of their own; see `control_group`. All must call it."""
    return control_group(tuple(sorted(ranks.members)), ranks.timeout)


def control_group(members: tuple[int, ...], timeout: float) -> Ranks:
    """Processes that agree over connections of their own, on the host, whatever else is under way.

    `members`: their ranks among all processes, in order; all of them must call it. What they ask
    each other meets nothing that DDP, a checkpoint or directions send.
    """
    make = _of_all if len(members) == dist.get_world_size() else _of_some
    try:
        return make(members, timeout)
    except RuntimeError as error:
        raise Gone(
            f"rank {dist.get_rank()} waited for ranks {', '.join(map(str, members))} to share an "
            f"optimizer's steps, and not all came within {timeout:g} s: look at what the others "
            f"printed last ({str(error).splitlines()[0]})"
        ) from error


def _of_all(members: tuple[int, ...], timeout: float) -> Ranks:
    """Torch keeps it until destroy_process_group(): optimizers have one in common."""
    key = (dist.group.WORLD, timeout)
    group = _controls.get(key)
    if group is None:
        own = dist.is_gloo_available() and dist.get_backend() != "fake"
        seconds = timedelta(seconds=timeout)
        group = dist.new_group(list(members), seconds, "gloo" if own else None)
        _controls[key] = group
    return Ranks(group, timeout)


def _of_some(members: tuple[int, ...], timeout: float) -> Ranks:
    """As new_group(use_local_synchronization=True), but named by its members: torch's name has the
    number of groups that a process is in, and where members are in differently many they would
    wait for each other under different names."""
    _made[members] += 1
    name = f"isokron {members} {_made[members]}"
    store = torch._C._distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank, size = members.index(dist.get_rank()), len(members)
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    group._register_backend(torch.device("cpu"), kind, gloo)
    return Ranks(group, timeout, listed=members)


def process_count() -> int:
    """How many processes torch.distributed knows of; 0 where it was not begun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
