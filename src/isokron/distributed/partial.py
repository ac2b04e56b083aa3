"""State of which a rank has a part: what collects all parts may read it, what forgets may not."""

from copy import deepcopy
from typing import Any, NoReturn


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
    state = {key: PartialState(entry) for key, entry in packed["state"].items()}
    return PartialState({**packed, "state": state})


def full_state_dict(optimizer: Any) -> dict[str, Any]:
    """The parts of all ranks put together, on all of them; all must call it.

    The same format as of the optimizer that is not distributed.
    """
    gather = getattr(optimizer, "full_state_dict", None)
    return gather() if gather is not None else optimizer.state_dict()
