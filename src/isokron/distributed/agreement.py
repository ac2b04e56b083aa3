"""Whether all ranks are about to take the same step, asked in one small all-reduce."""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from isokron.distributed.ranks import Ranks

AGREEMENT = 5 * torch.int64.itemsize  # bytes of what is asked before a step
APART = 1e-4  # by how much norms of equal gradients may differ, on unlike machines


@dataclass(frozen=True)
class Trouble:
    """What ranks have found wrong, and whether one of them would raise for it."""

    text: str
    fatal: bool


def agreed_trouble(
    ranks: Ranks,
    facts: Sequence[tuple[str, Any]],
    trouble: str | None,
    fatal: bool,
    length: float = 0.0,
) -> Trouble | None:
    """What any rank has found wrong, with who found it; None if all may go on.

    `facts`: what must be the same on all ranks, by name, else all raise. `trouble`: what this one
    found, and whether it would raise for it. `length`: of gradients that all ranks have alike.
    """
    mark = zlib.crc32(repr(facts).encode())
    level = 0 if trouble is None else 2 if fatal else 1
    # numbers above 0 have the order that their bits have as integers
    (bits,) = struct.unpack("q", struct.pack("d", length if math.isfinite(length) else 0.0))
    asked = torch.tensor([mark, -mark, level, bits, -bits], device=ranks.device)
    most, least, troubled, *bits_found = ranks.all_reduce_(asked, dist.ReduceOp.MAX).tolist()
    if most != -least:
        ranks.agree("what an optimizer shares", [name for name, _ in facts])
        for name, fact in facts:
            ranks.agree(name, fact)
        raise RuntimeError(
            f"the {ranks.size} ranks differ in what they are about to do: {facts!r} on rank "
            f"{ranks.rank}"
        )
    if not troubled:
        longest, shortest = (struct.unpack("d", struct.pack("q", abs(b)))[0] for b in bits_found)
        if longest - shortest > APART * longest:
            raise RuntimeError(
                f"gradients must be the same on all {ranks.size} ranks, but their norms are from "
                f"{shortest:.6g} to {longest:.6g}, and {length:.6g} on rank {ranks.rank}; call the "
                "model by its DistributedDataParallel, or average gradients before step()"
            )
        return None
    texts = ranks.gather_text(trouble or "")
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text.strip():
            found.setdefault(text, []).append(rank)
    told = [f"{text} (rank {', '.join(map(str, who))})" for text, who in found.items()]
    return Trouble("; ".join(told), troubled == 2)
