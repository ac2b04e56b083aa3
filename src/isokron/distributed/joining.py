"""From what a user passes as `group` to the ranks that work together."""

from datetime import timedelta
from typing import Any

from torch import distributed as dist

from isokron.distributed.ranks import TIMEOUT, Ranks


def ranks_of(who: str, group: Any = None, timeout: float = TIMEOUT) -> Ranks:
    """The ranks of a process group (None: of all processes). `who` asks, in an error."""
    if isinstance(group, Ranks):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{who} needs a process group and there is none; call "
            "torch.distributed.init_process_group first, as torchrun's scripts do"
        )
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        kind = "one that this rank is not in" if isinstance(found, int) else type(found).__name__
        raise TypeError(
            f"{who}: group must be a process group of which this rank is a member, got {kind}"
        )
    if not timeout > 0:
        raise ValueError(f"{who}: timeout must be a number of seconds above 0, got {timeout!r}")
    return Ranks(found, timeout)


def beside(ranks: Ranks) -> Ranks:
    """The same ranks over connections of their own, on the host, whatever else is under way.

    What travels here and there does not wait for one another. All ranks must call it.
    """
    if not dist.is_gloo_available():
        return ranks
    members = dist.get_process_group_ranks(ranks.group)
    group = dist.new_group(
        members,
        backend="gloo",
        timeout=timedelta(seconds=ranks.timeout),
        use_local_synchronization=True,
    )
    return Ranks(group, ranks.timeout)
