"""Gradient stores on disk: one row of numbers an example, in safetensors shards.

shard-00000.safetensors  gradients [rows, D], ids, and what else was stored of some examples
shard-00000.json         its size, checksum and header, until the store is finished
schema.json              what the rows are, until the store is finished
manifest.json            both of these for all shards: the store is finished

The schema fixes which examples make up which shard, so neither batches nor processes change a byte.
A shard counts once its record is beside it. Processes may die at any moment, and several may write
the same store at once: what has no record is written over.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from isokron._version import __version__
from isokron.attribution.projection import GENERATOR
from isokron.files import clear_beside, write_atomically

logger = logging.getLogger(__name__)

FORMAT = {"format": "isokron gradient store", "version": 2}
MANIFEST, SCHEMA = "manifest.json", "schema.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AGAIN = "run the same build command again"

Record = dict[str, Any]  # of a shard: bytes, sha256, header


class Span(NamedTuple):
    """A shard and its examples, `last` excluded."""

    number: int
    first: int
    last: int


@dataclass(frozen=True)
class Schema:
    """What a store holds, fixed before the first gradient. `columns`: layer and the shape of its
    part of a row; `settings`: whatever else decides the numbers."""

    settings: dict[str, Any]
    columns: tuple[tuple[str, tuple[int, ...]], ...]
    examples: int
    examples_per_shard: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("examples", "examples_per_shard"):
            if not isinstance(count := getattr(self, name), int) or count < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        if not self.columns or min(prod(shape) for _, shape in self.columns) < 1:
            raise ValueError(f"columns must have entries of a layer at least, got {self.columns}")

    @property
    def width(self) -> int:
        return sum(prod(shape) for _, shape in self.columns)

    @property
    def shards(self) -> int:
        return -(-self.examples // self.examples_per_shard)

    @property
    def digest(self) -> str:
        """One hash of everything, by which a shard says what it belongs to."""
        return _sha256(json.dumps(asdict(self), sort_keys=True).encode())

    def span(self, number: int) -> Span:
        first = number * self.examples_per_shard
        return Span(number, first, min(first + self.examples_per_shard, self.examples))

    def differences(self, other: "Schema") -> list[str]:
        """Every field, setting and layer that differs, with both values."""
        mine, theirs = ({**asdict(x), "columns": dict(x.columns)} for x in (self, other))
        return differences(mine, theirs) or ["the order of layers"]


class Store:
    """Gradients [examples, D] of a finished store; made by `open`."""

    def __init__(self, folder: Path, schema: Schema, shards: list[Record]) -> None:
        self.folder, self.schema, self.shards = folder, schema, shards
        self.settings, self.examples, self.width = schema.settings, schema.examples, schema.width
        self.dtype = DTYPES[schema.dtype]

    @staticmethod
    def open(folder: str | Path, verify: str = "size") -> "Store":
        """A finished store. `verify`: of every file "size" and header, or in "full" its bytes."""
        if verify not in ("size", "full"):
            raise ValueError(f"verify must be 'size' or 'full', got {verify!r}")
        folder = Path(folder)
        contents = _read_schema(folder, MANIFEST, SCHEMA)
        if contents is None:
            raise FileNotFoundError(f"no store in {folder}: {MANIFEST} is missing; build one first")
        schema, shards = contents
        if len(shards) != schema.shards:
            done = [*folder.glob("shard-*.json")]
            raise ValueError(_unfinished(folder, len(done), schema.shards))
        # queries would be projected by other random numbers than the rows
        if (generator := schema.settings.get("generator")) != GENERATOR:
            raise ValueError(
                f"the store in {folder} has projections of generator {generator!r}, and this "
                f"isokron {__version__} makes those of {GENERATOR!r}; build the store anew"
            )
        for number, record in enumerate(shards):
            if problem := _problem(folder, number, record, verify):
                raise ValueError(f"{folder / shard_file(number)} {problem}; {AGAIN}")
        return Store(folder, schema, shards)

    def __len__(self) -> int:
        return self.examples

    def columns(self, layer: str) -> slice:
        """Where a layer's part of a row is."""
        start = 0
        for name, shape in self.schema.columns:
            if name == layer:
                return slice(start, start + prod(shape))
            start += prod(shape)
        names = ", ".join(name for name, _ in self.schema.columns[:6])
        raise ValueError(f"layer {layer!r} is not in the store, which has {names}, …")

    def blocks(self, memory: int, shards: range | None = None) -> Iterator[tuple[int, Tensor]]:
        """First example and rows [≤ n, D] of each block, in the stored dtype, in order. A block of
        at most `memory` bytes lies in one shard; its pages are given back with the tensor."""
        row = self.width * self.dtype.itemsize
        if memory < row:
            raise ValueError(f"memory must hold a row of {row} bytes, got {memory}; give more")
        for number in range(len(self.shards)) if shards is None else shards:
            _, start, stop = self.schema.span(number)
            for first in range(start, stop, memory // row):
                last = min(first + memory // row, stop)
                yield first, self._tensor(number, "gradients", first - start, last - start)

    def rows(self, indices: Tensor | Sequence[int]) -> Tensor:
        """Rows of these examples, in the order asked for. [k] → [k, D]"""
        wanted = torch.as_tensor(indices, dtype=torch.int64).cpu()
        outside = wanted[(wanted < 0) | (wanted >= len(self))]
        if len(outside):
            raise IndexError(f"indices must be from 0 to {len(self) - 1}, got {int(outside[0])}")
        result = torch.empty(len(wanted), self.width, dtype=self.dtype)
        numbers = wanted // self.schema.examples_per_shard
        for number in numbers.unique().tolist():
            places = (numbers == number).nonzero()[:, 0]
            inside = wanted[places] - self.schema.span(number).first
            result[places] = self._tensor(number, "gradients")[inside]
        return result

    def ids(self) -> list[str]:
        """The name of every example."""
        texts = (self._tensor(number, "ids").numpy() for number in range(len(self.shards)))
        return [name for text in texts for name in json.loads(text.tobytes())]

    def extra(self, name: str) -> Tensor:
        """What was stored beside the gradients under a name. [examples, ...]"""
        if name not in (tensors := self.shards[0]["header"]["tensors"]):
            raise ValueError(f"the store has no {name!r}, it has {', '.join(tensors)}")
        return torch.cat([self._tensor(number, name) for number in range(len(self.shards))])

    def _tensor(self, number: int, name: str, *span: int) -> Tensor:
        # opened anew each time: a file that stays open keeps all pages that were ever touched
        with safe_open(self.folder / shard_file(number), "pt") as file:
            rows: Tensor = file.get_slice(name)[slice(*span or (None,))]
        return rows


class StoreWriter:
    """Writes the shards of one store; made by `open`."""

    def __init__(self, folder: Path, schema: Schema) -> None:
        self.folder, self.schema = folder, schema

    @staticmethod
    def open(
        folder: str | Path,
        *,
        settings: Mapping[str, Any],
        columns: Mapping[str, tuple[int, ...]],
        examples: int,
        examples_per_shard: int,
        dtype: torch.dtype = torch.float32,
    ) -> "StoreWriter":
        """Begin a store, or take up the one in the folder if all of this is the same.
        `settings`: JSON-able, what else decides the numbers; `columns`: layer → shape of its part
        of a row; `examples_per_shard`: a shard is in memory three times while it is written.
        """
        try:
            plain = json.loads(json.dumps({**settings, "generator": GENERATOR}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings must be JSON-able: {error}; give plain values") from None
        shapes = tuple((layer, tuple(map(int, shape))) for layer, shape in columns.items())
        schema = Schema(plain, shapes, examples, examples_per_shard, str(dtype)[len("torch.") :])
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(path.name for path in folder.glob("[!.]*"))
        # SCHEMA first, for another process may be finishing
        if (contents := _read_schema(folder, SCHEMA, MANIFEST)) is None:
            if files:
                problem = f"has other files in it, such as {files[0]}"
                raise ValueError(f"folder {str(folder)!r} {problem}; give a new folder")
            write_atomically(folder / SCHEMA, [_encoded(asdict(schema))])
            contents = _read_schema(folder, SCHEMA, MANIFEST)
        begun = schema if contents is None else contents[0]
        # 1 and 1.0 are equal: what is in the folder stays
        if begun != schema:
            raise ValueError(
                f"the store in {str(folder)!r} was begun with other settings: "
                f"{'; '.join(begun.differences(schema))}; use the same, or give a new folder"
            )
        return StoreWriter(folder, begun)

    def missing(self, shards: Iterable[int] | None = None) -> list[Span]:
        """The shards, of all or of these, that are not there complete, by size and SHA-256."""
        records, spans = self._records(), []
        for number in range(self.schema.shards) if shards is None else shards:
            problem = _problem(self.folder, number, records.get(number), "full")
            if problem:
                spans.append(self.schema.span(number))
            if problem and number in records:
                logger.warning("%s is written anew: %s", shard_file(number), problem)
        return spans

    def write(
        self,
        number: int,
        gradients: Tensor,
        *,
        ids: Sequence[str],
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a shard: rows [n, D] in the store's dtype, n ids, and further tensors [n, ...]."""
        if not 0 <= number < self.schema.shards:
            raise ValueError(f"number must be from 0 to {self.schema.shards - 1}, got {number}")
        _, first, last = self.schema.span(number)
        shape = last - first, self.schema.width
        if gradients.shape != shape or not gradients.dtype.is_floating_point:
            raise ValueError(
                f"gradients of shard {number} must be floating of shape {shape}, got "
                f"{gradients.dtype} {tuple(gradients.shape)}"
            )
        if {"gradients", "ids"} & (extra := dict(extra or {})).keys():
            raise ValueError(f"extra must not hold gradients or ids, got {list(extra)}; rename it")
        for name, count in {"ids": len(ids), **{key: len(extra[key]) for key in extra}}.items():
            if count != len(gradients):
                wrong = f"must be {len(gradients)}, one an example, got {count}"
                raise ValueError(f"{name} of shard {number} {wrong}")
        rows = gradients.detach().to("cpu", DTYPES[self.schema.dtype]).contiguous()
        _check_finite(rows, first)
        tensors = {name: value.detach().cpu().contiguous() for name, value in extra.items()}
        names = torch.frombuffer(bytearray(json.dumps(list(ids)).encode()), dtype=torch.uint8)
        owner = {**FORMAT, "settings": self.schema.digest, "first_example": first}
        # one key only: safetensors writes several in no particular order
        metadata = {"isokron": json.dumps(owner)}
        content = save({**tensors, "gradients": rows, "ids": names}, metadata)
        path = self.folder / shard_file(number)
        write_atomically(path, [content])
        record = {"bytes": len(content), "sha256": _sha256(content), "header": _header(path)}
        write_atomically(path.with_suffix(".json"), [_encoded(record)])

    def finish(self) -> Store:
        """Gather the records into the manifest and open the store; any process may, or all."""
        records = self._records()
        if len(records) < self.schema.shards:
            raise ValueError(_unfinished(self.folder, len(records), self.schema.shards))
        shards = [records[number] for number in range(self.schema.shards)]
        for number, names in enumerate([list(record["header"]["tensors"]) for record in shards]):
            if names != list(shards[0]["header"]["tensors"]):
                raise ValueError(
                    f"shards must hold the same tensors, {shard_file(number)} has {names}; write "
                    "all with the same extra, in a new folder"
                )
        content = _encoded({**asdict(self.schema), "shards": shards})
        manifest = self.folder / MANIFEST
        if not manifest.exists() or manifest.read_bytes() != content:
            write_atomically(manifest, [content])
        paths = [self.folder / shard_file(number) for number in range(self.schema.shards)]
        passing = [*(path.with_suffix(".json") for path in paths), self.folder / SCHEMA]
        for path in (*paths, *passing, manifest):
            clear_beside(path)
        for path in passing:
            path.unlink(missing_ok=True)
        return Store.open(self.folder)

    def _records(self) -> dict[int, Record]:
        beside = {}
        for number in range(self.schema.shards):
            path = (self.folder / shard_file(number)).with_suffix(".json")
            try:
                beside[number] = _read(path)
            except FileNotFoundError:
                continue
            except ValueError as error:
                logger.warning("%s cannot be used and is written anew: %s", path, error)
        # read last, for another process may be moving records into the manifest
        contents = _read_schema(self.folder, MANIFEST)
        return {**dict(enumerate(contents[1] if contents else ())), **beside}


def shard_file(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Every place where two JSON values differ: "name was … and is now …"."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = list({**before, **now})
        pairs = [(before.get(key), now.get(key), f"{name}.{key}".lstrip(".")) for key in keys]
        return [line for pair in pairs for line in differences(*pair)]
    return [] if before == now else [f"{name} was {before!r} and is now {now!r}"]


def _read_schema(folder: Path, *names: str) -> tuple[Schema, list[Record]] | None:
    """The schema in the first of these files that is there, and the shards that it lists."""
    for name in names:
        with suppress(FileNotFoundError):
            body = _read(folder / name)
            shards = body.pop("shards", [])
            columns = tuple((layer, tuple(shape)) for layer, shape in body.pop("columns"))
            return Schema(columns=columns, **body), shards
    return None


def _encoded(body: Mapping[str, Any]) -> bytes:
    """JSON with its format and checksum; the same value is the same bytes."""
    digest = _sha256(json.dumps(body).encode())
    return json.dumps({**FORMAT, "checksum": digest, **body}, indent=1).encode() + b"\n"


def _read(path: Path) -> dict[str, Any]:
    """What `_encoded` was given."""
    try:
        body = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged, not JSON: {error}; build the store anew") from None
    if lines := differences(FORMAT, {name: body.pop(name, None) for name in FORMAT}):
        raise ValueError(
            f"{path} is none of this isokron {__version__}: {'; '.join(lines)}; build the store "
            "anew, or use the isokron that built it"
        )
    if lines := differences(body.pop("checksum", None), _sha256(json.dumps(body).encode())):
        raise ValueError(f"{path} is damaged: checksum{lines[0]}; build the store anew")
    return body


def _problem(folder: Path, number: int, record: Record | None, verify: str) -> str:
    """What is wrong with a shard, by its record; "full": with every byte, by its SHA-256."""
    path = folder / shard_file(number)
    if record is None or not path.is_file():
        return "is missing"
    lines = differences(record["bytes"], path.stat().st_size, "its size in bytes")
    if not lines and verify == "full":
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines = differences(record["sha256"], digest, "SHA-256")
    lines = lines or differences(record["header"], _header(path))
    return f"is damaged or foreign: {'; '.join(lines)}" if lines else ""


def _header(path: Path) -> dict[str, Any]:
    """What a shard says of itself: its owner and examples, and dtype and shape of its tensors."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in sorted(file.keys())}
            tensors = {name: [part.get_dtype(), part.get_shape()] for name, part in slices.items()}
            return {"tensors": tensors, **json.loads((file.metadata() or {})["isokron"])}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        return {"header": f"unreadable: {error}"}


def _check_finite(rows: Tensor, first: int) -> None:
    # the extremes are NaN where any entry is, and far quicker than isfinite of all
    if not all(extreme.isfinite() for extreme in rows.aminmax()):
        example = first + int(rows.isfinite().all(1).int().argmin())
        raise ValueError(
            f"gradients must be finite, those of example {example} are not in {rows.dtype}; "
            "store them in float32 or bfloat16, or leave the example out"
        )


def _unfinished(folder: Path, done: int, total: int) -> str:
    return f"the store in {folder} is not finished: {done} of {total} shards are there; {AGAIN}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
