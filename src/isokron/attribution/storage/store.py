"""Reading a gradient store: checked when it is opened, mapped when it is read."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isokron.attribution.storage.manifest import AGAIN, DTYPES, MANIFEST, PLAN, Plan, read_plan
from isokron.attribution.storage.ragged import Display, unpack_bytes
from isokron.attribution.storage.shards import VERIFY, Shard, open_shard


class Store:
    """Gradients [rows, D] of examples, shard after shard; made by `open`."""

    def __init__(self, folder: Path, plan: Plan, shards: list[Shard]) -> None:
        self.folder = folder
        self.plan = plan
        self.shards = shards
        starts = [0]
        for shard in shards:
            starts.append(starts[-1] + shard.record.rows)
        self._starts = starts

    @staticmethod
    def open(folder: str | Path, verify: str = "size") -> "Store":
        """A finished store. `verify`: every file's "size" and head, or in "full" its bytes too."""
        if verify not in VERIFY:
            raise ValueError(f"verify must be one of {VERIFY}, got {verify!r}")
        folder = Path(folder)
        path = folder / MANIFEST
        if not path.is_file():
            if (folder / PLAN).is_file():
                plan = read_plan(folder / PLAN)[0]
                done = len(list(folder.glob("shard-*.json")))
                raise ValueError(unfinished(folder, done, plan))
            raise FileNotFoundError(f"no store in {folder}: {MANIFEST} is missing; build one first")
        plan, records = read_plan(path)
        if len(records) != plan.shards:
            raise ValueError(unfinished(folder, len(records), plan))
        return Store(folder, plan, [open_shard(folder, plan, r, verify) for r in records])

    def __len__(self) -> int:
        """Rows: examples, or tokens in a store of tokens."""
        return self._starts[-1]

    @property
    def width(self) -> int:
        """D, the columns of all layers."""
        return self.plan.width

    @property
    def examples(self) -> int:
        return self.plan.examples

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.plan.dtype]

    @property
    def settings(self) -> dict[str, Any]:
        return self.plan.settings

    @cached_property
    def example(self) -> Tensor:
        """Whose row it is: position of the example in the data, ascending. [rows]"""
        return self.extra("example")

    @property
    def position(self) -> Tensor:
        """Of the token in its example, in a store of tokens. [rows]"""
        return self.extra("position")

    def extra(self, name: str) -> Tensor:
        """What was stored beside the gradients under a name. [rows, ...]"""
        if name not in self.shards[0]:
            has = ", ".join(sorted(self.shards[0].places))
            raise ValueError(f"the store has no {name!r}, it has {has}")
        return torch.cat([shard.tensor(name) for shard in self.shards])

    def columns(self, layer: str) -> slice:
        """Where a layer's part of a row is."""
        for column in self.plan.columns:
            if column.layer == layer:
                return slice(column.offset, column.offset + column.size)
        names = ", ".join(column.layer for column in self.plan.columns[:6])
        raise ValueError(f"layer {layer!r} is not in the store, which has {names}, …")

    def blocks(self, memory: int, shards: range | None = None) -> Iterator[tuple[int, Tensor]]:
        """First row and rows [≤ n, D] of each block, in the stored dtype, in order.

        `memory`: bytes a block may take; it lies in one shard, and is given back with its tensor.
        `shards`: these only.
        """
        row = self.width * self.dtype.itemsize
        if memory < row:
            raise ValueError(f"memory must hold a row of {row} bytes, got {memory}; give more")
        for number in range(len(self.shards)) if shards is None else shards:
            start, shard = self._starts[number], self.shards[number]
            rows = shard.record.rows
            for first in range(0, rows, memory // row):
                last = min(first + memory // row, rows)
                yield start + first, shard.tensor("gradients", first, last)

    def rows(self, indices: Tensor | Sequence[int]) -> Tensor:
        """Some rows, in the order asked for. [k] → [k, D]"""
        wanted = torch.as_tensor(indices, dtype=torch.int64).cpu()
        outside = wanted[(wanted < 0) | (wanted >= len(self))]
        if len(outside):
            raise IndexError(
                f"indices must be from 0 to {len(self) - 1}, got {int(outside[0])}; they are rows, "
                "see Store.example for those of an example"
            )
        result = torch.empty(len(wanted), self.width, dtype=self.dtype)
        owner = torch.bucketize(wanted, torch.tensor(self._starts[1:]), right=True)
        for number in owner.unique().tolist():
            mine = (owner == number).nonzero()[:, 0]
            inside = wanted[mine] - self._starts[number]
            result[mine] = self.shards[number].tensor("gradients")[inside]
        return result

    def span(self, shards: range) -> tuple[int, int]:
        """First row of neighbouring shards, and last, excluded."""
        return self._starts[shards.start], self._starts[shards.stop]

    def ids(self) -> list[str]:
        """The name of every example."""
        return [text.decode() for s in self.shards for text in unpack_bytes(s.tensor, "ids")]

    def display(self, example: int) -> Display | None:
        """What a report shows of an example; None in a store without."""
        if not 0 <= example < self.examples:
            raise IndexError(f"example must be from 0 to {self.examples - 1}, got {example}")
        number, inside = divmod(example, self.plan.examples_per_shard)
        shard = self.shards[number]
        if "display" not in shard:
            return None
        (kind,) = unpack_bytes(shard.tensor, "kinds", inside, 1)
        (content,) = unpack_bytes(shard.tensor, "display", inside, 1)
        return Display(json.loads(kind), content)


def unfinished(folder: Path, done: int, plan: Plan) -> str:
    return (
        f"the store in {folder} is not finished: {done} of {plan.shards} shards are there; {AGAIN}"
    )
