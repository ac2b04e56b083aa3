"""Building a gradient store: shard by shard, by any number of processes, killed at any moment.

A shard counts when its record stands beside it, and the store when `finish` has gathered the
records into the manifest. Whatever else is found is written over.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isokron.attribution.storage.checks import check_alike, check_extra, check_rows
from isokron.attribution.storage.manifest import (
    MANIFEST,
    PLAN,
    Plan,
    Record,
    encoded,
    make_plan,
    manifest_json,
    read_json,
    read_plan,
    shard_file,
)
from isokron.attribution.storage.ragged import Display, pack_bytes
from isokron.attribution.storage.shards import open_shard, write_shard
from isokron.attribution.storage.store import Store, unfinished
from isokron.files import clear_beside, write_atomically

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    """A shard and its examples, `last` excluded."""

    number: int
    first: int
    last: int


class StoreWriter:
    """Writes the shards of one store; made by `open`."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan

    @staticmethod
    def open(
        folder: str | Path,
        *,
        settings: Mapping[str, Any],
        columns: Mapping[str, tuple[int, ...]],
        examples: int,
        examples_per_shard: int,
        dtype: torch.dtype = torch.float32,
        per_token: bool = False,
    ) -> "StoreWriter":
        """Begin a store, or take up the one in the folder if all of this is the same.

        `settings`: JSON-able, what else decides the numbers; `columns`: layer → shape of its part
        of a row; `per_token`: examples have any number of rows, each with a position.
        """
        plan = make_plan(settings, columns, examples, examples_per_shard, dtype, per_token)
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"folder {str(folder)!r} is a file; give a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        content = sorted(path.name for path in folder.glob("[!.]*"))
        there = _plan_in(folder)
        if there is None:
            if content:
                raise ValueError(
                    f"folder {str(folder)!r} has other files in it, such as {content[0]}; "
                    "give a new folder"
                )
            write_atomically(folder / PLAN, [encoded(plan.to_json())])
            there = _plan_in(folder) or plan
        if there != plan:  # 1 and 1.0 are the same, so what stands in the folder is kept
            raise ValueError(
                f"the store in {str(folder)!r} was begun with other settings: "
                f"{'; '.join(there.differences(plan))}; use the same, or give a new folder"
            )
        return StoreWriter(folder, there)

    def missing(self, shards: Iterable[int] | None = None) -> list[Span]:
        """The shards, of all or of some, that are not there whole, by size and SHA-256."""
        numbers = range(self.plan.shards) if shards is None else shards
        records = self._records()
        return [
            Span(number, *self.plan.span(number))
            for number in numbers
            if number not in records or not self._is_whole(records[number])
        ]

    def write(
        self,
        number: int,
        gradients: Tensor,
        *,
        ids: Sequence[str],
        example: Tensor | None = None,
        position: Tensor | None = None,
        display: Sequence[Display] | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a shard whole. `gradients`: [rows, D], cast to the store's dtype piece by piece.

        `ids`, `display`: one for every example of the shard; `example`, `position`: [rows], whose
        row it is, needed where there are several; `extra`: further tensors [rows, ...] by name.
        """
        if not 0 <= number < self.plan.shards:
            raise ValueError(f"number must be from 0 to {self.plan.shards - 1}, got {number}")
        first, last = self.plan.span(number)
        if example is None and not self.plan.per_token:
            example = torch.arange(first, last)
        check_extra(extra or {})
        tensors = {"gradients": gradients, "example": example, "position": position}
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        given |= dict(extra or {})
        check_rows(self.plan, number, given)
        for name, texts in (("ids", ids), ("display", display)):
            if texts is not None and len(texts) != last - first:
                raise ValueError(
                    f"{name} must be one for each of the {last - first} examples of shard "
                    f"{number}, got {len(texts)}"
                )
        given |= pack_bytes("ids", [text.encode() for text in ids])
        if display is not None:
            given |= pack_bytes("display", [shown.content for shown in display])
            given |= pack_bytes("kinds", [json.dumps(shown.kind).encode() for shown in display])
        record = write_shard(self.folder, self.plan, number, given)
        write_atomically(self._record_file(number), [encoded(asdict(record))])

    def finish(self) -> Store:
        """Gather the records into the manifest and open the store; any process may, or all."""
        found = self._records()
        if len(found) < self.plan.shards:
            raise ValueError(unfinished(self.folder, len(found), self.plan))
        records = [found[number] for number in range(self.plan.shards)]
        for record in records:
            open_shard(self.folder, self.plan, record)
        check_alike(records)
        content, manifest = encoded(manifest_json(self.plan, records)), self.folder / MANIFEST
        if not manifest.exists() or manifest.read_bytes() != content:
            write_atomically(manifest, [content])
        self._tidy()
        return Store.open(self.folder)

    def _tidy(self) -> None:
        """Leave nothing but the shards and their manifest."""
        shards = [self.folder / shard_file(number) for number in range(self.plan.shards)]
        passing = [*(path.with_suffix(".json") for path in shards), self.folder / PLAN]
        for path in (*shards, *passing, self.folder / MANIFEST):
            clear_beside(path)
        for path in passing:
            path.unlink(missing_ok=True)

    def _record_file(self, number: int) -> Path:
        return (self.folder / shard_file(number)).with_suffix(".json")

    def _records(self) -> dict[int, Record]:
        """By shard: those beside the shards, and for the rest those of a manifest.

        In this order, for another process may be putting the former into the latter.
        """
        beside = {number: self._record(number) for number in range(self.plan.shards)}
        manifest = self.folder / MANIFEST
        listed = read_plan(manifest)[1] if manifest.exists() else []
        own = {number: record for number, record in beside.items() if record is not None}
        return {**dict(enumerate(listed)), **own}

    def _record(self, number: int) -> Record | None:
        path = self._record_file(number)
        try:
            record = Record(**read_json(path))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            logger.warning("%s cannot be used and is written anew: %s", path, error)
            return None
        same = (record.file, record.first) == (shard_file(number), self.plan.span(number)[0])
        return record if same else None

    def _is_whole(self, record: Record) -> bool:
        try:
            open_shard(self.folder, self.plan, record, verify="full")
        except (ValueError, FileNotFoundError) as error:
            logger.warning("%s is written anew: %s", record.file, error)
            return False
        return True


def _plan_in(folder: Path) -> Plan | None:
    """The plan of a store: by itself until the manifest is there, and then in that."""
    for name in (PLAN, MANIFEST):  # in this order, for another process may be finishing
        with suppress(FileNotFoundError):
            return read_plan(folder / name)[0]
    return None
