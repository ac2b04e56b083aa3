"""One shard: a safetensors file that says what it belongs to, written in pieces, read by mapping.

Reading maps the pages that are asked for, which costs nothing until they are touched, and gives
them back with the tensor: a scan runs near the speed of memory and holds one block at a time.
"""

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isokron.attribution.storage.manifest import (
    AGAIN,
    DTYPES,
    FORMAT,
    MANIFEST,
    VERSION,
    Plan,
    Record,
    differing,
    shard_file,
)
from isokron.files import write_atomically

# names of safetensors
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
KINDS = {code: dtype for dtype, code in CODES.items()}
ALIGNMENT = 64
# Bytes that are cast, hashed and written at once.
PIECE = 1 << 24
VERIFY = ("size", "full")


def write_shard(folder: Path, plan: Plan, number: int, tensors: Mapping[str, Tensor]) -> Record:
    """Write a shard's tensors, `gradients` in the dtype of the plan, and say what was written."""
    first, last = plan.span(number)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    dtypes["gradients"] = DTYPES[plan.dtype]
    # wide entries first, so that all are aligned
    order = sorted(tensors, key=lambda name: (-dtypes[name].itemsize, name))
    known: dict[str, Any] = {
        name: {"dtype": CODES[dtypes[name]], "shape": list(tensors[name].shape)} for name in order
    }
    head, _, size = _head(plan, number, known)
    seen = hashlib.sha256()

    def parts() -> Iterator[bytes | memoryview]:
        seen.update(head)
        yield head
        for name in order:
            for start, piece in _pieces(tensors[name], dtypes[name]):
                if name == "gradients":
                    _check_finite(piece, tensors["example"][start:])
                content = piece.view(-1).view(torch.uint8).numpy().data
                seen.update(content)
                yield content

    file, rows = shard_file(number), len(tensors["gradients"])
    write_atomically(folder / file, parts())
    return Record(file, first, last - first, rows, size, seen.hexdigest(), known)


@dataclass(frozen=True)
class Shard:
    """A shard that has been checked, and where its tensors are in the file."""

    path: Path
    record: Record
    places: dict[str, int]

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor, or rows of it, over pages of its own; writing to them leaves the file alone."""
        known = self.record.tensors[name]
        dtype, (rows, *rest) = KINDS[known["dtype"]], known["shape"]
        stop = rows if stop is None else stop
        shape, width = (stop - start, *rest), prod(rest) * dtype.itemsize
        if prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        place = self.places[name] + start * width
        skip = place % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            length = skip + (stop - start) * width
            pages = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=place - skip)
        return torch.frombuffer(pages, dtype=dtype, count=prod(shape), offset=skip).view(shape)


def open_shard(folder: Path, plan: Plan, record: Record, verify: str = "size") -> Shard:
    """Check a shard against what was recorded of it; "full": every byte, by its SHA-256."""
    path = folder / record.file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {AGAIN}, which writes it anew")
    wanted = {"dtype": CODES[DTYPES[plan.dtype]], "shape": [record.rows, plan.width]}
    try:
        head, places, size = _head(plan, record.first // plan.examples_per_shard, record.tensors)
        if (size, record.tensors["gradients"]) != (record.bytes, wanted):
            raise ValueError(f"{size} bytes with gradients {wanted} are none of it")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{MANIFEST} is damaged: its record of {path} is {record}: {error}; build it anew"
        ) from None
    if (now := path.stat().st_size) != size:
        raise ValueError(_damaged(path, f"its size was {size} bytes and is now {now} bytes"))
    if verify == "full" and (digest := _sha256(path)) != record.sha256:
        raise ValueError(_damaged(path, f"SHA-256 was {record.sha256} and is now {digest}"))
    with path.open("rb") as file:
        found = file.read(len(head))
    if found != head:
        raise ValueError(_damaged(path, "; ".join(differing(_told(head), _told(found)))))
    return Shard(path, record, places)


def _head(plan: Plan, number: int, known: Mapping[str, Any]) -> tuple[bytes, dict[str, int], int]:
    """The bytes before the data, the place in the file of every tensor, and the file's size.

    All of it follows from the plan and the record, so a file is compared with it byte by byte.
    """
    header: dict[str, Any] = {"__metadata__": _metadata(plan, number)}
    ends = [0]
    for name, entry in known.items():
        ends.append(ends[-1] + prod(entry["shape"]) * KINDS[entry["dtype"]].itemsize)
        header[name] = {**entry, "data_offsets": ends[-2:]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    places = {name: len(head) + end for name, end in zip(known, ends, strict=False)}
    return head, places, len(head) + ends[-1]


def _metadata(plan: Plan, number: int) -> dict[str, str]:
    first, last = plan.span(number)
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "settings": plan.digest,
        "first_example": str(first),
        "examples": str(last - first),
    }


def _told(head: bytes) -> dict[str, Any]:
    """What a file says of itself, to tell the difference."""
    try:
        return {"length": int.from_bytes(head[:8], "little"), **json.loads(head[8:])}
    except (ValueError, TypeError):
        return {"head": head[:40]}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, difference: str) -> str:
    return f"{path} is damaged or foreign: {difference}; {AGAIN}"


def _pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """First row and rows of each piece, on the host in the dtype, none of them empty."""
    if tensor.numel() == 0:
        return
    rows = max(1, PIECE * len(tensor) // (tensor.numel() * dtype.itemsize))
    for start in range(0, len(tensor), rows):
        part = tensor[start : start + rows].detach()
        yield start, part.to("cpu", dtype).contiguous()


def _check_finite(piece: Tensor, examples: Tensor) -> None:
    # the extremes are NaN where any entry is, and far quicker than isfinite of all
    if not all(extreme.isfinite() for extreme in piece.aminmax()):
        example = int(examples[int(piece.isfinite().all(1).int().argmin())])
        raise ValueError(
            f"gradients must be finite, those of example {example} are not in {piece.dtype}; "
            "store them in float32 or bfloat16, or leave the example out"
        )
