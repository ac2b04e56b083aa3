"""The processes there are, and how one asks to be one of those that share."""

from datetime import timedelta
from typing import Any

from torch import distributed as dist

from isokron.distributed.ranks import TIMEOUT, Ranks


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
    """The same ranks over connections of their own, on the host, whatever else is under way.

    What travels here and there does not wait for one another. All ranks must call it.
    """
    if not dist.is_gloo_available():
        return ranks
    group = dist.new_group(
        dist.get_process_group_ranks(ranks.group),
        backend="gloo",
        timeout=timedelta(seconds=ranks.timeout),
        use_local_synchronization=True,
    )
    return Ranks(group, ranks.timeout)


def process_count() -> int:
    """How many processes torch.distributed knows of; 0 where it was not begun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
