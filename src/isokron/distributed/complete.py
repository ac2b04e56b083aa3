"""State of which every rank has a part, put together on all of them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isokron.distributed.places import is_sharded
from isokron.distributed.ranks import Ranks
from isokron.distributed.team import gather


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor, of which this rank may have a shard."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def completed(entries: Mapping[int, Mapping[str, Any]], ranks: Ranks) -> dict[int, dict[str, Any]]:
    """All that any rank has of every parameter, by its number; what several have is the same."""
    result = {number: dict(entry) for number, entry in entries.items()}
    own = {
        f"{number} {key}": value
        for number, entry in result.items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }
    for part in gather(ranks, own):
        for name, value in part.items():
            number, key = name.split(" ", 1)
            result.setdefault(int(number), {}).setdefault(key, value)
    return result
