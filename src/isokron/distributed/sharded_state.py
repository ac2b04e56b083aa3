"""Optimizer state across ranks as DTensors, which torch.distributed.checkpoint reshards by itself.

A block's state is kept whole by the block's owner. In a state dict it is a DTensor with Shard(0)
over the ranks that share the parameter, whoever owns the block, so that checkpoints do not depend
on owners or on the number of ranks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils import _pytree as pytree

from isokron.distributed.block_exchange import BlockExchange
from isokron.distributed.dtensor import chunk_bounds
from isokron.distributed.process_group import process_count

GATHER_BYTES = 8 << 20  # of a buffer in which full state is gathered


def shard_rows(exchange: BlockExchange, stacked: Tensor) -> list[Tensor]:
    """This rank's chunk, along dimension 0, of every block's state.

    stacked: the state of the blocks owned here, [B, n, ...]. Numbers, [B], are not cut: every rank
    gets all of them.
    """
    ranks, owners, row = exchange.ranks, exchange.owners, stacked.shape[1:]
    if not row:
        numbers = dict(gather_rows(exchange, stacked))
        return [numbers[i] for i in range(len(owners))]
    counts, near = Counter(owners), ranks.near(stacked.device)
    bounds = chunk_bounds(row[0], ranks.size)
    chunks = [stacked[:, lo:hi].reshape(-1) for lo, hi in pairwise(bounds)]
    chunk = (bounds[ranks.rank + 1] - bounds[ranks.rank], *row[1:])
    sizes = [counts[r] * prod(chunk) for r in range(ranks.size)]
    sent = torch.cat(chunks).to(near)
    received = sent.new_empty(sum(sizes))
    ranks.all_to_all_into(received, sent, sizes, [len(flat) for flat in chunks]).wait()
    flats = received.to(stacked.device).split(sizes)
    pieces = [flat.view(counts[r], *chunk) for r, flat in enumerate(flats)]
    return _by_owner(owners, pieces)


def gather_rows(exchange: BlockExchange, stacked: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The number and the state of every block, some at a time in a buffer of GATHER_BYTES.

    stacked: of the blocks owned here, [B, ...]
    """
    ranks, row = exchange.ranks, stacked.shape[1:]
    owned = [[i for i, o in enumerate(exchange.owners) if o == r] for r in range(ranks.size)]
    count = max(1, GATHER_BYTES // (ranks.size * max(1, prod(row)) * stacked.element_size()))
    for start in range(0, max(map(len, owned)), count):
        length = min(count, max(map(len, owned)) - start)
        sent = stacked.new_zeros(length, *row, device=ranks.near(stacked.device))
        rows = stacked[start : start + length]
        sent[: len(rows)] = rows
        gathered = ranks.all_gather(sent).to(stacked.device)
        for blocks, values in zip(owned, gathered, strict=True):
            yield from zip(blocks[start : start + length], values, strict=False)


def _by_owner(owners: Sequence[int], pieces: Sequence[Tensor]) -> list[Tensor]:
    """Rows in the order of the blocks, of which every rank's piece has its own in order."""
    queues = [iter(piece) for piece in pieces]
    return [next(queues[owner]) for owner in owners]


def unshard_rows(exchange: BlockExchange, chunks: Sequence[Tensor], like: Tensor) -> Tensor:
    """Undo `shard_rows`: the state of the blocks owned here, in the form of `like`. [B, n, ...]"""
    ranks, row, count = exchange.ranks, like.shape[1:], len(exchange.owned)
    near = ranks.near(like.device)
    by_owner: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    for owner, chunk in zip(exchange.owners, chunks, strict=True):
        by_owner[owner].append(chunk.to(near, like.dtype).reshape(-1))
    empty = torch.empty(0, dtype=like.dtype, device=near)
    sent = torch.cat([empty, *(chunk for of_owner in by_owner for chunk in of_owner)])
    bounds = chunk_bounds(row[0], ranks.size)
    lengths = [hi - lo for lo, hi in pairwise(bounds)]
    sizes = [count * length * prod(row[1:]) for length in lengths]
    received = sent.new_empty(sum(sizes))
    send_sizes = [sum(map(Tensor.numel, of_owner)) for of_owner in by_owner]
    ranks.all_to_all_into(received, sent, sizes, send_sizes).wait()
    pieces = [
        flat.view(count, length, *row[1:])
        for flat, length in zip(received.split(sizes), lengths, strict=True)
    ]
    return torch.cat(pieces, 1).to(like.device)


class PartialState(dict[Any, Any]):
    """A state dict, or one parameter's entry in it, of which this rank has a part.

    torch.distributed.checkpoint reads it as any dict. Pickling it, as torch.save does, would lose
    the parts of the other ranks, and raises.
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


def partial_state(state_dict: Mapping[str, Any]) -> PartialState:
    """An optimizer's state dict as a partial one.

    Entries are too: torch.distributed.checkpoint takes them out of the dict around them.
    """
    _register_with_pytree()
    state = {key: PartialState(entry) for key, entry in state_dict["state"].items()}
    return PartialState({**state_dict, "state": state})


@cache
def _register_with_pytree() -> None:
    # torch maps functions over dicts, but over subclasses of dict only if they are registered
    pytree.register_pytree_node(
        PartialState,
        lambda state: (list(state.values()), list(state)),
        lambda values, keys: PartialState(zip(keys or (), values, strict=True)),
        serialized_type_name="isokron.distributed.PartialState",
    )


def full_state_dict(optimizer: Any, to_rank: int | None = None) -> dict[str, Any]:
    """An optimizer's state dict as one process would have it, with plain tensors.

    All ranks must call it. All get it, or only the global rank `to_rank`; the others get {}.
    """
    if hasattr(optimizer, "full_state_dict"):
        full: dict[str, Any] = optimizer.full_state_dict(to_rank)
        return full
    state_dict: dict[str, Any] = optimizer.state_dict()
    return state_dict if is_receiver(to_rank) else {}


def is_receiver(to_rank: int | None) -> bool:
    """Whether this process gets what goes to one global rank, or to all for None."""
    count = max(1, process_count())
    if to_rank is None:
        return True
    if isinstance(to_rank, bool) or not isinstance(to_rank, int) or not 0 <= to_rank < count:
        raise ValueError(
            f"to_rank must be None, for all ranks, or one of the ranks 0 to {count - 1}, got "
            f"{to_rank!r}"
        )
    return to_rank == (dist.get_rank() if process_count() else 0)
