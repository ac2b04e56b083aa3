"""State of which a rank has a part: what collects all parts may read it, what forgets may not."""

import sys
from copy import deepcopy
from functools import cache
from types import FrameType
from typing import Any, NoReturn

from torch import distributed as dist
from torch.utils import _pytree as pytree

from isokron.distributed.ranks import Ranks
from isokron.distributed.world import process_count


class PartialState(dict[Any, Any]):
    """A state dict, or one parameter's entry in it, of which this rank has a part only.

    torch.distributed.checkpoint, which writes the parts of all ranks, reads it as any dict.
    Pickling it, as torch.save does, would lose what is on the other ranks: that raises.
    """

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "this state dict holds one rank's part, and saving it would lose the others'; save "
            "isokron.distributed.full_state_dict(optimizer), called on all ranks, or "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) "
            "with torch.distributed.checkpoint.save"
        )

    def copy(self) -> "PartialState":
        return PartialState(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartialState":
        return PartialState({deepcopy(k, memo): deepcopy(v, memo) for k, v in self.items()})


def partial_state(packed: dict[str, Any]) -> PartialState:
    """An optimizer's state dict as a partial one, each parameter's entry too.

    Entries outlive the dict around them in torch.distributed.checkpoint's own state dicts.
    """
    _let_trees_know()
    state = {key: PartialState(entry) for key, entry in packed["state"].items()}
    return PartialState({**packed, "state": state})


@cache
def _let_trees_know() -> None:
    """Torch walks through dicts, and through subclasses of dict only where it was told how."""
    pytree.register_pytree_node(
        PartialState,
        lambda state: (list(state.values()), list(state)),
        lambda values, keys: PartialState(zip(keys or (), values, strict=True)),
        serialized_type_name="isokron.distributed.PartialState",
    )


def full_state_dict(optimizer: Any, to_rank: int | None = None) -> dict[str, Any]:
    """The parts of all ranks put together, in the format of the optimizer that is not distributed.

    All ranks must call it. All get it, or `to_rank` alone, counted in all processes: the others
    get {}.
    """
    gather = getattr(optimizer, "full_state_dict", None)
    if gather is not None:
        full: dict[str, Any] = gather(to_rank)
        return full
    state: dict[str, Any] = optimizer.state_dict()
    return state if is_receiver(to_rank) else {}


def is_receiver(to_rank: int | None) -> bool:
    """Whether this process is to get what goes to one rank, or to all for None."""
    count = max(1, process_count())
    if to_rank is None:
        return True
    if isinstance(to_rank, bool) or not isinstance(to_rank, int) or not 0 <= to_rank < count:
        raise ValueError(
            f"to_rank must be None, for all ranks, or one of the ranks 0 to {count - 1}, got "
            f"{to_rank!r}"
        )
    return to_rank == (dist.get_rank() if process_count() else 0)


def rank_in(ranks: Ranks, rank: int) -> int | None:
    """How these ranks count a process that is `rank` of all; None if it is not one of them."""
    members = dist.get_process_group_ranks(ranks.group)
    return members.index(rank) if rank in members else None


def asked_by_torch() -> Any:
    """What torch.distributed.checkpoint.state_dict asks an optimizer with; None if it does not.

    With `full_state_dict=True` it puts shards of DTensors together and takes everything else from
    one rank: what others own would be lost without a word. It has no way to say so to an optimizer,
    so its frame is read.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        theirs = frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        if theirs and frame.f_code.co_name == "_get_optim_state_dict":
            return frame.f_locals.get("info")
        frame = frame.f_back
    return None


def full_is_asked_for() -> bool:
    """Whether torch asks for all that any rank has."""
    return bool(getattr(asked_by_torch(), "full_state_dict", False))
