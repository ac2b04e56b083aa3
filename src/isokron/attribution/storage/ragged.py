"""Lists of byte strings as two tensors: all bytes in a row, and where each begins."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Display(NamedTuple):
    """What a report shows of an example: `content` is text or an image, as `kind` says.

    `kind`: "text", "png", or anything JSON can hold.
    """

    kind: Any
    content: bytes


def pack_bytes(name: str, strings: Sequence[bytes]) -> dict[str, Tensor]:
    """{name: uint8 [bytes], name.offsets: int64 [strings + 1]}"""
    lengths = torch.tensor([0, *map(len, strings)])
    joined = bytearray(b"".join(strings))  # a buffer that torch may own
    flat = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0).byte()
    return {name: flat, f"{name}.offsets": lengths.cumsum(0)}


def unpack_bytes(
    read: Callable[[str, int, int | None], Tensor],
    name: str,
    start: int = 0,
    count: int | None = None,
) -> list[bytes]:
    """`count` of the strings, from `start` on. `read`: rows of a tensor by name, first and last."""
    stop = None if count is None else start + count + 1
    offsets = read(f"{name}.offsets", start, stop).tolist()
    flat = read(name, offsets[0], offsets[-1]).numpy().tobytes()
    ends = [offset - offsets[0] for offset in offsets]
    return [flat[a:b] for a, b in pairwise(ends)]
