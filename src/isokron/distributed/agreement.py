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
FIT, SKIP, NOT_FINITE, FAILED = range(4)  # how bad a trouble is: all do what the worst one asks for


@dataclass(frozen=True)
class Trouble:
    """What ranks have found wrong, and how bad it is."""

    text: str
    level: int


def trouble_of(error: Exception) -> Trouble:
    """Of a rank that is going to raise."""
    if isinstance(error, FloatingPointError):
        return Trouble(str(error), NOT_FINITE)
    return Trouble(f"{type(error).__name__}: {error}", FAILED)


def agreed_trouble(
    ranks: Ranks,
    facts: Sequence[tuple[str, Any]],
    trouble: Trouble | None,
    length: float = 0.0,
    what: str = "an agreement",
) -> Trouble | None:
    """What any rank has found wrong, with who found it; None if all may go on.

    `facts`: what must be the same on all ranks, by name, else all raise; nobody asks for them where
    a rank is going to raise. `trouble`: what this one found. `length`: of gradients that all ranks
    have alike. `what`: for what, in an error.
    """
    mark = zlib.crc32(repr(facts).encode())
    level = FIT if trouble is None else trouble.level
    # numbers above 0 have the order that their bits have as integers
    (bits,) = struct.unpack("q", struct.pack("d", length if math.isfinite(length) else 0.0))
    asked = torch.tensor([mark, -mark, level, bits, -bits], device=ranks.device)
    most, least, worst, *bits_found = ranks.all_reduce_(asked, dist.ReduceOp.MAX, what).tolist()
    if worst < NOT_FINITE and most != -least:
        _raise_difference(ranks, facts)
    if worst == FIT:
        longest, shortest = (struct.unpack("d", struct.pack("q", abs(b)))[0] for b in bits_found)
        if longest - shortest > APART * longest:
            raise RuntimeError(
                f"gradients must be the same on all {ranks.size} ranks, but their norms are from "
                f"{shortest:.6g} to {longest:.6g}, and {length:.6g} on rank {dist.get_rank()}; "
                "call the model by its DistributedDataParallel, or average gradients before step()"
            )
        return None
    texts = ranks.gather_text("" if trouble is None else trouble.text)
    found: dict[str, list[int]] = {}
    for rank, text in zip(ranks.members, texts, strict=True):
        if text.strip():
            found.setdefault(text, []).append(rank)
    told = [f"{text} (rank {', '.join(map(str, who))})" for text, who in found.items()]
    return Trouble("; ".join(told), worst)


def _raise_difference(ranks: Ranks, facts: Sequence[tuple[str, Any]]) -> None:
    """On all ranks, the first fact in which they differ."""
    ranks.agree("what an optimizer shares", [name for name, _ in facts])
    for name, fact in facts:
        ranks.agree(name, fact)
    raise RuntimeError(
        f"the {ranks.size} ranks differ in what they are about to do: {facts!r} on rank "
        f"{dist.get_rank()}"
    )
