"""The processes there are, and how one asks to be one of those that share."""

from typing import Any

from torch import distributed as dist

from isokron.distributed.ranks import TIMEOUT, Ranks


def ranks_of(group: Any = None, timeout: float = TIMEOUT) -> Ranks:
    """The ranks of a process group, by default of all processes; `timeout`: seconds they wait."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group to share work in; call "
            "torch.distributed.init_process_group() first, as scripts under torchrun do"
        )
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    chosen = dist.group.WORLD if group is None else group
    if dist.get_rank(chosen) < 0:
        raise ValueError(
            f"ranks_of(group): this process (rank {dist.get_rank()}) is not in the group; call it "
            "on the ranks of the group only"
        )
    return Ranks(chosen, timeout)


def process_count() -> int:
    """How many processes torch.distributed knows of; 1 without it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
