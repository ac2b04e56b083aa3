"""Work that ranks share: who goes first, who failed, and named tensors that change hands."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from isokron.distributed.ranks import Gone, Ranks

Named = Mapping[str, Tensor]


class Elsewhere(RuntimeError):
    """Another rank has failed, and says itself why."""


@contextmanager
def together(ranks: Ranks | None, what: str) -> Iterator[None]:
    """All ranks end this with an error if one does: none goes on to wait for one that failed.

    What is done in it takes no others: who waits for them there does not hear of their failure.
    """
    if ranks is None:
        yield
        return
    with _telling(ranks):
        yield
    _raise_elsewhere(ranks, what)


@contextmanager
def in_turn(ranks: Ranks | None, what: str) -> Iterator[None]:
    """Rank 0 does it, then all others: what it has written is there for them."""
    if ranks is None:
        yield
        return
    if ranks.rank:
        _raise_elsewhere(ranks, what)
        yield
        return
    with _telling(ranks):
        yield
    _raise_elsewhere(ranks, what)


def share(ranks: Ranks | None, count: int) -> range:
    """Which of so many are this rank's: neighbours, as many as others have, or one more."""
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    return range(rank * count // size, (rank + 1) * count // size)


def side_by_side(ranks: Ranks | None, own: Tensor, dim: int = -1) -> Tensor:
    """Everybody's parts, which may differ in the length of one dimension, joined by rank."""
    if ranks is None:
        return own
    sent = own.movedim(dim, 0).contiguous().to(ranks.near(own.device))
    parts = ranks.all_gather_uneven(sent)
    return torch.cat(parts).movedim(0, dim).contiguous().to(own.device)


@dataclass(frozen=True)
class Team:
    """Ranks as those see them who have work to divide and know nothing of how it travels."""

    ranks: Ranks

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def together(self, what: str) -> Any:
        return together(self.ranks, what)

    def exchange(self, outgoing: Sequence[Named]) -> list[dict[str, Tensor]]:
        return exchange(self.ranks, outgoing)

    def gather(self, own: Named) -> list[dict[str, Tensor]]:
        return gather(self.ranks, own)

    def texts(self, text: str) -> list[str]:
        return self.ranks.gather_text(text)


def team(ranks: Ranks | None) -> Team | None:
    return None if ranks is None else Team(ranks)


def exchange(ranks: Ranks, outgoing: Sequence[Named]) -> list[dict[str, Tensor]]:
    """Named tensors of every rank for this one. `outgoing`: of this rank for each, by rank."""
    told = [json.loads(text) for text in ranks.gather_text(_told(outgoing))]
    of_each = [sum(map(_size, sender[ranks.rank].values())) for sender in told]
    to_each = [sum(map(_size, part.values())) for part in told[ranks.rank]]
    sent = _flat([tensor for part in outgoing for tensor in part.values()], ranks.device)
    received = sent.new_empty(sum(of_each))
    ranks.all_to_all_into(received, sent, of_each, to_each).wait()
    parts = zip(told, received.split(of_each), strict=True)
    return [_named(sender[ranks.rank], part) for sender, part in parts]


def gather(ranks: Ranks, own: Named) -> list[dict[str, Tensor]]:
    """Everybody's named tensors, by rank."""
    told = [json.loads(text)[0] for text in ranks.gather_text(_told([own]))]
    parts = ranks.all_gather_uneven(_flat(list(own.values()), ranks.device))
    return [_named(each, part) for each, part in zip(told, parts, strict=True)]


def _told(outgoing: Sequence[Named]) -> str:
    def kind(tensor: Tensor) -> tuple[str, list[int]]:
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)

    return json.dumps([{name: kind(tensor) for name, tensor in p.items()} for p in outgoing])


def _size(kind: tuple[str, list[int]]) -> int:
    return _dtype(kind[0]).itemsize * prod(kind[1])


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _flat(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """All bytes, one after the other."""
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8).to(device) for t in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)


def _named(told: Mapping[str, tuple[str, list[int]]], flat: Tensor) -> dict[str, Tensor]:
    """Each in memory of its own: products of tensors that begin elsewhere may round otherwise."""
    pieces = flat.split([_size(kind) for kind in told.values()])
    return {
        name: piece.clone().view(_dtype(kind[0])).view(kind[1])
        for (name, kind), piece in zip(told.items(), pieces, strict=True)
    }


@contextmanager
def _telling(ranks: Ranks) -> Iterator[None]:
    """The others hear of an error; but those that did not come will not come for this."""
    try:
        yield
    except Gone:
        raise
    except Exception:
        with suppress(Gone):
            _failed(ranks, True)
        raise


def _raise_elsewhere(ranks: Ranks, what: str) -> None:
    failed = _failed(ranks, False)
    if failed:
        some = ", ".join(map(str, failed))
        raise Elsewhere(f"rank {some} of {ranks.size} failed in {what}: see what it says")


def _failed(ranks: Ranks, here: bool) -> list[int]:
    """The ranks that have failed."""
    everyone = ranks.all_gather(torch.tensor([int(here)], device=ranks.device)).flatten()
    found: list[int] = everyone.nonzero().flatten().tolist()
    return found
