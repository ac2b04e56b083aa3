"""The processes there are, and how one asks to be one of those that share."""

from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

from torch import distributed as dist

from isokron.distributed.ranks import TIMEOUT, Gone, Ranks

# each has threads and connections, so optimizers of the same ranks have one; torch lets it live
# until destroy_process_group()
_controls: WeakValueDictionary[Any, Any] = WeakValueDictionary()


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
    """The same ranks over connections of their own; see `control`. All of them must call it."""
    return control(tuple(ranks.members), ranks.timeout)


def control(members: tuple[int, ...], timeout: float) -> Ranks:
    """Processes that agree over connections of their own, on the host, whatever else is under way.

    `members`: their ranks among all processes, all of which must call it. What they ask each other
    meets nothing that DDP, a checkpoint or directions send.
    """
    key = (dist.group.WORLD, members, timeout)
    group = _controls.get(key)
    if group is None:
        own = dist.is_gloo_available() and dist.get_backend() != "fake"
        try:
            group = dist.new_group(
                list(members),
                backend="gloo" if own else None,
                timeout=timedelta(seconds=timeout),
                # torch names a group that not all processes make by how many groups each has, in
                # which they may differ: where all are members, all make it
                use_local_synchronization=len(members) < dist.get_world_size(),
            )
        except RuntimeError as error:
            raise Gone(
                f"rank {dist.get_rank()} waited for ranks {', '.join(map(str, members))} to share "
                f"an optimizer's steps, and not all came within {timeout:g} s: look at what the "
                f"others printed last ({str(error).splitlines()[0]})"
            ) from error
        _controls[key] = group
    return Ranks(group, timeout)


def process_count() -> int:
    """How many processes torch.distributed knows of; 0 where it was not begun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
