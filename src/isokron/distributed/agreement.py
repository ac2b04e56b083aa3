"""Whether all ranks are about to take the same step, asked in one small all-reduce."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from isokron.distributed.ranks import Ranks

AGREEMENT = 3 * torch.int64.itemsize  # bytes of what is asked before a step


@dataclass(frozen=True)
class Trouble:
    """What ranks have found wrong, and whether one of them would raise for it."""

    text: str
    fatal: bool


def agreed_trouble(
    ranks: Ranks, facts: Sequence[tuple[str, Any]], trouble: str | None, fatal: bool
) -> Trouble | None:
    """What any rank has found wrong, with who found it; None if all may go on.

    `facts`: what must be the same on all ranks, by name, else all raise. `trouble`: what this one
    found, and whether it would raise for it.
    """
    mark = zlib.crc32(repr(facts).encode())
    level = 0 if trouble is None else 2 if fatal else 1
    asked = torch.tensor([mark, -mark, level], device=ranks.device)
    most, least, troubled = ranks.all_reduce_(asked, dist.ReduceOp.MAX).tolist()
    if most != -least:
        ranks.agree("what an optimizer shares", [name for name, _ in facts])
        for name, fact in facts:
            ranks.agree(name, fact)
        raise RuntimeError(
            f"the {ranks.size} ranks differ in what they are about to do: {facts!r} on rank "
            f"{ranks.rank}"
        )
    if not troubled:
        return None
    texts = ranks.gather_text(trouble or "")
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text.strip():
            found.setdefault(text, []).append(rank)
    told = [f"{text} (rank {', '.join(map(str, who))})" for text, who in found.items()]
    return Trouble("; ".join(told), troubled == 2)
