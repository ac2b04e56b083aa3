"""Work divided among ranks: shares, turns, failures that all ranks hear of, gathered results."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from isokron.distributed.process_group import RankLost, Ranks


class RankFailed(RuntimeError):
    """Another rank has failed and reports the reason itself."""


@contextmanager
def together(ranks: Ranks | None, what: str) -> Iterator[None]:
    """End with an error on all ranks if the body raises on one.

    The body must not use collectives: a rank waiting in one would not hear of the failure.
    """
    if ranks is None:
        yield
        return
    with _announce_errors(ranks):
        yield
    _raise_if_any_failed(ranks, what)


@contextmanager
def in_turn(ranks: Ranks | None, what: str) -> Iterator[None]:
    """Run the body on rank 0, then on all others, so that they find the files it has written."""
    if ranks is None:
        yield
        return
    if ranks.rank:
        _raise_if_any_failed(ranks, what)
        yield
        return
    with _announce_errors(ranks):
        yield
    _raise_if_any_failed(ranks, what)


def share(ranks: Ranks | None, count: int) -> range:
    """This rank's share of `count` items: consecutive, and equal on all ranks up to one item."""
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    return range(rank * count // size, (rank + 1) * count // size)


def side_by_side(ranks: Ranks | None, part: Tensor, dim: int = -1) -> Tensor:
    """Concatenate the parts of all ranks, in order, along a dimension in which they may differ."""
    if ranks is None:
        return part
    sent = part.movedim(dim, 0).contiguous().to(ranks.near(part.device))
    return torch.cat(ranks.all_gather_uneven(sent)).movedim(0, dim).contiguous().to(part.device)


def gather(ranks: Ranks, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The named tensors of all ranks; names, shapes and dtypes may differ from rank to rank."""
    forms = {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in tensors.items()
    }
    forms_of_ranks = [json.loads(text) for text in ranks.gather_text(json.dumps(forms))]
    flat = [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(ranks.device)
        for tensor in tensors.values()
    ]
    empty = torch.empty(0, dtype=torch.uint8, device=ranks.device)
    buffers = ranks.all_gather_uneven(torch.cat([empty, *flat]))
    return [_unpacked(of, buffer) for of, buffer in zip(forms_of_ranks, buffers, strict=True)]


def _unpacked(forms: Mapping[str, tuple[str, list[int]]], buffer: Tensor) -> dict[str, Tensor]:
    dtypes: dict[str, Any] = {name: getattr(torch, dtype) for name, (dtype, _) in forms.items()}
    sizes = [dtypes[name].itemsize * prod(shape) for name, (_, shape) in forms.items()]
    # clones are aligned; a product of tensors at other addresses may round differently
    return {
        name: piece.clone().view(dtypes[name]).view(shape)
        for (name, (_, shape)), piece in zip(forms.items(), buffer.split(sizes), strict=True)
    }


@contextmanager
def _announce_errors(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except RankLost:  # ranks that did not come before will not come for this either
        raise
    except Exception:
        with suppress(RankLost):
            _failed_ranks(ranks, True)
        raise


def _raise_if_any_failed(ranks: Ranks, what: str) -> None:
    failed = _failed_ranks(ranks, False)
    if failed:
        names = ", ".join(map(str, failed))
        raise RankFailed(f"rank {names} of {ranks.size} failed in {what}: see what it says")


def _failed_ranks(ranks: Ranks, failed: bool) -> list[int]:
    flags = ranks.all_gather(torch.tensor([int(failed)], device=ranks.device)).flatten()
    numbers: list[int] = flags.nonzero().flatten().tolist()
    return numbers
