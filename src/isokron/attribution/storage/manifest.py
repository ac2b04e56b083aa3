"""What a gradient store is, as a value and as JSON: its plan before it is built, its shards after.

The plan fixes which examples make up which shard, so neither batches nor processes change a byte.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from isokron._version import __version__

FORMAT = "isokron gradient store"
VERSION = 1
MANIFEST = "manifest.json"
PLAN = "plan.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AGAIN = "run the same build command again"


@dataclass(frozen=True)
class Column:
    """The columns of one layer: `size` of them from `offset` on, a flattened `shape`."""

    layer: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Record:
    """One shard: its first example and how many, and the name, dtype and shape of its tensors."""

    file: str
    first: int
    examples: int
    rows: int
    bytes: int
    sha256: str
    tensors: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """All that is known before the first gradient. `settings`: whatever else must be the same."""

    settings: dict[str, Any]
    columns: tuple[Column, ...]
    examples: int
    examples_per_shard: int
    dtype: str
    per_token: bool

    @property
    def width(self) -> int:
        return sum(column.size for column in self.columns)

    @property
    def shards(self) -> int:
        return -(-self.examples // self.examples_per_shard)

    def span(self, number: int) -> tuple[int, int]:
        """First example of a shard, and the first of the next."""
        first = number * self.examples_per_shard
        return first, min(first + self.examples_per_shard, self.examples)

    @cached_property
    def digest(self) -> str:
        """One hash of everything, by which a shard says what it belongs to."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest}
        return {**head, **asdict(self)}

    def differences(self, other: "Plan") -> list[str]:
        """Every field that differs, with both values: "name was … and is now …"."""
        return differing(_comparable(self), _comparable(other))


def make_plan(
    settings: Mapping[str, Any],
    columns: Mapping[str, tuple[int, ...]],
    examples: int,
    examples_per_shard: int,
    dtype: torch.dtype,
    per_token: bool,
) -> Plan:
    """A plan of checked values; `columns`: layer → shape of its part of a gradient."""
    try:
        kept = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"settings must be JSON-able: {error}; give plain values") from None
    for name, count in (("examples", examples), ("examples_per_shard", examples_per_shard)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")
    names = {kind: name for name, kind in DTYPES.items()}
    if dtype not in names:
        raise ValueError(f"dtype must be one of {', '.join(map(str, names))}, got {dtype}")
    if not columns:
        raise ValueError("columns must name a layer at least, got none; give layer → shape")
    made, offset = [], 0
    for layer, shape in columns.items():
        size = prod(shape)
        if size < 1:
            raise ValueError(f"columns of layer {layer!r} must have entries, got shape {shape}")
        made.append(Column(layer, tuple(map(int, shape)), offset, size))
        offset += size
    return Plan(kept, tuple(made), examples, examples_per_shard, names[dtype], bool(per_token))


def shard_file(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def manifest_json(plan: Plan, records: list[Record]) -> dict[str, Any]:
    rows = sum(record.rows for record in records)
    return {**plan.to_json(), "rows": rows, "shards": [asdict(record) for record in records]}


def encoded(value: Mapping[str, Any]) -> bytes:
    """JSON as it stands in files: the same value is the same bytes."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def read_plan(path: Path) -> tuple[Plan, list[Record]]:
    """The plan in a file, and the shards that it lists: none but in a manifest."""
    found = read_json(path)
    if found.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {found.get('format')!r}, and a gradient store has {FORMAT!r}; "
            "give the folder of a store"
        )
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {found.get('version')!r}, and this isokron {__version__} reads "
            f"{VERSION}; build the store anew, or use the isokron that built it"
        )
    try:
        columns = tuple(
            Column(**{**column, "shape": tuple(column["shape"])}) for column in found["columns"]
        )
        own = [found[name] for name in ("examples", "examples_per_shard", "dtype", "per_token")]
        plan = Plan(found["settings"], columns, *own)
        records = [Record(**record) for record in found.get("shards", [])]
        digest = found["digest"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, it lacks {error}; build the store anew") from None
    if plan.digest != digest:
        raise ValueError(
            f"{path} is damaged, its digest is {digest} and that of its fields {plan.digest}; "
            "build the store anew"
        )
    for number, record in enumerate(records):
        if (record.file, record.first) != (shard_file(number), plan.span(number)[0]):
            raise ValueError(
                f"{path} is damaged, its shard {number} is {record.file!r} from example "
                f"{record.first} on; build the store anew"
            )
    return plan, records


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; build the store anew") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, not an object; build it anew")
    return found


def _comparable(plan: Plan) -> dict[str, Any]:
    """Fields by name, the columns by layer."""
    columns = {column.layer: list(column.shape) for column in plan.columns}
    order = [column.layer for column in plan.columns]
    return {**asdict(plan), "columns": columns, "layers": order}


def differing(one: Any, other: Any, name: str = "") -> list[str]:
    """Every place where two JSON values differ, with both."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = list({**one, **other})
        pairs = [(one.get(key), other.get(key), f"{name}.{key}".lstrip(".")) for key in keys]
        return [line for pair in pairs for line in differing(*pair)]
    return [] if one == other else [f"{name} was {one!r} and is now {other!r}"]
