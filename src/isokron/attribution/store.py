"""Gradient stores on disk: one row of numbers per example, in safetensors shards.

schema.json              settings, columns of each layer, examples per shard
entries.safetensors      by layer, the entries of the whitened gradient that a row has
shard-00000.safetensors  gradients [rows, D], ids and further tensors of these examples; its header
                         has the digest of the schema and checksums of its tensors, of the gradients
                         by blocks of rows, which are compared whenever they are read

Files are written atomically, so a store is finished once all of its shards exist. A process may be
killed at any moment, and several may write the same store: the bytes are the same.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from isokron._version import __version__
from isokron.digest import hash_of
from isokron.files import (
    check_free,
    check_same,
    clear_beside,
    lock,
    write_atomically,
    write_json,
)

logger = logging.getLogger(__name__)

FORMAT = {"format": "isokron gradient store", "version": 5}
SCHEMA, ENTRIES = "schema.json", "entries.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AGAIN = "run the same build command again"
REBUILD = "build again (isokron build) to write this shard anew, and no other"
CHECKED = 2**20  # bytes of rows that have a checksum together
SECTOR = 64  # words of a part of these
ANEW = "delete the folder and build the store anew"


class Span(NamedTuple):
    """A shard and its range of examples; `last` is excluded."""

    number: int
    first: int
    last: int


@dataclass(frozen=True)
class Schema:
    """What a store contains; fixed before the first row is written.

    settings: JSON-able; all settings that the numbers depend on. columns: layer → width in a row.
    entries: SHA-256 of the entries that were chosen.
    """

    settings: dict[str, Any]
    columns: dict[str, int]
    examples: int
    examples_per_shard: int
    dtype: str = "float32"
    entries: str = ""

    @property
    def width(self) -> int:
        return sum(self.columns.values())

    @property
    def shards(self) -> int:
        return -(-self.examples // self.examples_per_shard)

    def digest(self) -> str:
        """A hash of the schema, by which a shard is matched to its store."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def span(self, number: int) -> Span:
        first = number * self.examples_per_shard
        return Span(number, first, min(first + self.examples_per_shard, self.examples))


class Store:
    """Gradients [examples, D] in a folder: `begin` a store to write it, `open` a finished one.

    Writing a shard takes three times its size in memory.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self.folder, self.schema = folder, schema
        self.dtype = DTYPES[schema.dtype]

    @staticmethod
    def begin(folder: str | Path, schema: Schema) -> "Store":
        """A store to write, or the one in the folder if its schema is the same."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        check_free(folder, SCHEMA, (ENTRIES,))
        if not (folder / SCHEMA).exists():
            write_json(folder / SCHEMA, {**FORMAT, **asdict(schema)})
        begun = read_schema(folder)
        check_same(folder, "store", _flat(begun), _flat(schema))
        return Store(folder, begun)

    @staticmethod
    def open(folder: str | Path, verify: bool = False) -> "Store":
        """A finished store, with its headers checked, and with `verify` all bytes."""
        store = Store(Path(folder), read_schema(Path(folder)))
        problems = [store._problem(number, verify) for number in range(store.schema.shards)]
        if absent := problems.count("is missing"):
            raise ValueError(
                f"the store in {folder} is not finished: {len(problems) - absent} of "
                f"{len(problems)} shards are there; {AGAIN}"
            )
        for number, problem in enumerate(problems):
            if problem:
                raise ValueError(f"{store._path(number)} {problem}; {REBUILD}")
        return store

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While shards are written: other processes may write them too, and none removes them."""
        with (self.folder / SCHEMA).open("rb") as file:
            lock(file, wait=True, shared=True)
            yield

    def __len__(self) -> int:
        return self.schema.examples

    def missing(self, shards: Iterable[int] | None = None) -> list[Span]:
        """Shards, of all or of those given, that do not exist or are damaged."""
        spans = []
        for number in range(self.schema.shards) if shards is None else shards:
            if problem := self._problem(number, verify=True):
                spans.append(self.schema.span(number))
                if self._path(number).exists():
                    logger.warning("%s is written anew: it %s", self._path(number).name, problem)
        return spans

    def write(
        self, number: int, gradients: Tensor, ids: Sequence[str], extra: Mapping[str, Tensor]
    ) -> None:
        """Write a shard: rows [n, D], n ids, and further tensors [n, ...]."""
        first = self.schema.span(number).first
        rows = gradients.detach().to("cpu", self.dtype).contiguous()
        _check_finite(rows, first)
        names = torch.frombuffer(bytearray(json.dumps(list(ids)).encode()), dtype=torch.uint8)
        tensors = {name: value.detach().cpu().contiguous() for name, value in extra.items()}
        tensors |= {"gradients": rows, "ids": names}
        header = self._header(number) | {
            "tensors": {name: _form(value) for name, value in tensors.items()},
            "sums": {name: self._sums(name, value) for name, value in tensors.items()},
        }
        # one key only: safetensors writes several in no particular order
        write_atomically(self._path(number), [save(tensors, {"isokron": json.dumps(header)})])

    def finish(self) -> "Store":
        """Open the finished store, and remove temporary files of killed processes."""
        store = Store.open(self.folder)
        for path in (
            self.folder / SCHEMA,
            self.folder / ENTRIES,
            *map(self._path, range(self.schema.shards)),
        ):
            clear_beside(path)
        return store

    def columns(self, layer: str) -> slice:
        """The columns of a layer in a row."""
        names, widths = list(self.schema.columns), list(self.schema.columns.values())
        first = sum(widths[: names.index(layer)])
        return slice(first, first + self.schema.columns[layer])

    def blocks(self, memory: int, shards: range | None = None) -> Iterator[Tensor]:
        """Rows [≤ n, D] in the stored dtype and in order, in blocks of at most `memory` bytes.

        A block lies within one shard, and its memory is freed with the tensor.
        """
        row = self.schema.width * self.dtype.itemsize
        if memory < row:
            raise ValueError(f"memory must hold a row of {row} bytes, got {memory}; give more")
        size = memory // row
        # whole parts that have a checksum, also if fewer rows are asked for
        step = size if size < self.checked_rows else size - size % self.checked_rows
        for number in range(self.schema.shards) if shards is None else shards:
            _, start, stop = self.schema.span(number)
            for first in range(0, stop - start, max(step, self.checked_rows)):
                part = slice(first, first + max(step, self.checked_rows))
                yield from self._tensor(number, "gradients", part).split(step)

    def ids(self) -> list[str]:
        """The name of every example."""
        texts = (self._tensor(number, "ids").numpy() for number in range(self.schema.shards))
        return [name for text in texts for name in json.loads(text.tobytes())]

    def extra(self, name: str) -> Tensor:
        """A further tensor that was written with the gradients: [examples, ...]"""
        return torch.cat([self._tensor(number, name) for number in range(self.schema.shards)])

    def _tensor(self, number: int, name: str, part: slice = slice(None)) -> Tensor:
        """A tensor of a shard, or rows of it from a part on that has a checksum."""
        path = self._path(number)
        try:
            # opened every time, since an open file keeps all pages that were read in memory
            with safe_open(path, "pt") as file:
                header = json.loads(file.metadata()["isokron"])
                tensor: Tensor = file.get_slice(name)[part]
            first = (part.start or 0) // self.checked_rows
            sums = self._sums(name, tensor)
            if problem := self._header_problem(number, header):
                raise ValueError(problem)
            if sums != header["sums"][name][first : first + len(sums)]:
                raise ValueError(f"the checksum of its {name} differs")
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}; {REBUILD}") from None
        return tensor

    @property
    def checked_rows(self) -> int:
        """Rows of gradients that have a checksum together."""
        return max(1, CHECKED // max(1, self.schema.width * self.dtype.itemsize))

    def _sums(self, name: str, tensor: Tensor) -> list[int]:
        parts = tensor.split(self.checked_rows) if name == "gradients" else [tensor]
        return [checksum(part) for part in parts]

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"

    def _header(self, number: int) -> dict[str, Any]:
        return {"schema": self.schema.digest(), "first": self.schema.span(number).first}

    def _problem(self, number: int, verify: bool) -> str:
        """What is wrong with a shard, or ""; with `verify`, all of its bytes are checked."""
        path, span = self._path(number), self.schema.span(number)
        if not path.is_file():
            return "is missing"
        try:
            with safe_open(path, "pt") as file:
                header = json.loads(file.metadata()["isokron"])
                if problem := self._header_problem(number, header):
                    return problem
                names = set(file.keys())
                forms = {name: _form(file.get_slice(name)) for name in names}
                if forms != header["tensors"]:
                    return f"is damaged: its tensors are {forms}"
                shape = forms["gradients"][1]
                if shape != [span.last - span.first, self.schema.width]:
                    return f"is damaged: its gradients have the shape {shape}"
                wrong = [
                    name
                    for name in names
                    if verify and self._sums(name, file.get_tensor(name)) != header["sums"][name]
                ]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            return f"is damaged: {error}"
        return f"is damaged: the checksum of its {min(wrong)} differs" if wrong else ""

    def _header_problem(self, number: int, header: Mapping[str, Any]) -> str:
        expected = self._header(number)
        if {name: header.get(name) for name in expected} != expected:
            return "belongs to another store, or to another place in it"
        return ""


def checksum(tensor: Tensor) -> int:
    """Σ_k (2k + 1) · Σ of the 64-bit words of sector k, modulo 2⁶⁴; the rest by CRC-32.

    Several times as fast as CRC-32 of all bytes. Any change of the sum of one sector is found, and
    so are sectors that have changed places.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    size = 8 * SECTOR
    whole = flat.numel() - flat.numel() % size
    words = flat[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    sectors = words.view(torch.int64).view(-1, SECTOR).sum(1)
    factors = torch.arange(1, 2 * len(sectors) + 1, 2)
    return int((sectors * factors).sum()) + zlib.crc32(flat[whole:].numpy().tobytes())


def _form(rows: Any) -> list[Any]:
    """dtype and shape of a tensor, or of a slice of a file."""
    shape = rows.shape if isinstance(rows, Tensor) else rows.get_shape()
    return [str(rows[:0].dtype), list(shape)]


def discard_other(folder: Path, schema: Schema) -> None:
    """Remove an unfinished store with other settings, unless another process is writing it."""
    if not (folder / SCHEMA).exists():
        return
    begun = read_schema(folder)
    if begun.settings == json.loads(json.dumps(schema.settings)) and begun.dtype == schema.dtype:
        return
    with (folder / SCHEMA).open("rb") as file:
        if not lock(file, wait=False):
            raise ValueError(
                f"another process is building a store with other settings in {folder}; wait until "
                "it ends, or give a new folder"
            )
        for path in folder.glob("shard-*.safetensors"):
            path.unlink()
        # last: by this file the folder is known to have a store in it
        (folder / SCHEMA).unlink()


def read_schema(folder: Path) -> Schema:
    path = folder / SCHEMA
    if not path.exists():
        raise FileNotFoundError(f"no store in {folder}: {SCHEMA} is missing; build one first")
    try:
        body = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged, not JSON: {error}; build the store anew") from None
    stored = {name: body.pop(name, None) for name in FORMAT}
    if stored != FORMAT:
        raise ValueError(
            f"{path} is of {stored}, and this isokron {__version__} reads {FORMAT}; build the "
            "store anew"
        )
    try:
        return Schema(**body)
    except TypeError as error:
        raise ValueError(f"{path} is damaged: {error}; build the store anew") from None


def write_entries(folder: Path, entries: Mapping[str, Tensor]) -> str:
    """Write the entries of each layer; returns their SHA-256, for the schema."""
    folder.mkdir(parents=True, exist_ok=True)
    check_free(folder, SCHEMA, (ENTRIES,))
    write_atomically(folder / ENTRIES, [save(dict(entries))])
    return hash_of(dict(sorted(entries.items())))


def read_entries(folder: Path, schema: Schema) -> dict[str, Tensor]:
    """The entries of each layer, checked to be those of the schema."""
    path = folder / ENTRIES
    try:
        entries = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {ANEW}") from None
    if hash_of(dict(sorted(entries.items()))) != schema.entries:
        raise ValueError(f"{path} is damaged: its SHA-256 differs; {ANEW}")
    return entries


def _flat(schema: Schema) -> dict[str, Any]:
    """One entry per setting and layer, so that an error names the one that differs."""
    columns = {f"columns of {layer}": width for layer, width in schema.columns.items()}
    sizes = {"examples": schema.examples, "examples_per_shard": schema.examples_per_shard}
    return {**schema.settings, **sizes, "dtype": schema.dtype, **columns, "entries": schema.entries}


def _check_finite(rows: Tensor, first: int) -> None:
    # the extremes are NaN if any entry is, and much faster than isfinite of all entries
    if not all(extreme.isfinite() for extreme in rows.aminmax()):
        example = first + int(rows.isfinite().all(1).int().argmin())
        raise ValueError(
            f"gradients must be finite, those of example {example} are not in {rows.dtype}; "
            "store them in float32 or bfloat16, or leave the example out"
        )
