"""State of which every rank has a part, put together on all of them."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isokron.distributed.places import is_sharded
from isokron.distributed.ranks import Ranks

Entries = dict[Any, dict[str, Any]]  # of every parameter, by number: values by key


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor, of which this rank may have a shard."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def completed(entries: Mapping[Any, Mapping[str, Any]], ranks: Ranks) -> Entries:
    """All that any rank has of every parameter: one all-gather of bytes, and one of their names.

    What several have is the same on all of them.
    """
    result: Entries = {number: dict(entry) for number, entry in entries.items()}
    names, chunks = [], []
    for number, entry in result.items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                names.append([number, key, list(value.shape), str(value.dtype)])
                chunks.append(value.detach().cpu().contiguous().view(-1).view(torch.uint8))
    bytes_here = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8)
    texts = ranks.gather_text(json.dumps(names))
    parts = ranks.all_gather_uneven(bytes_here.to(ranks.device))
    for text, part in zip(texts, parts, strict=True):
        at = 0
        for number, key, shape, name in json.loads(text):
            dtype = getattr(torch, name.removeprefix("torch."))
            size = torch.Size(shape).numel() * dtype.itemsize
            if key not in result.setdefault(number, {}):
                result[number][key] = part[at : at + size].clone().view(dtype).view(shape)
            at += size
    return result
