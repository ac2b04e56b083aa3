"""A small gradient store, made again and again: the same call gives the same bytes."""

from pathlib import Path

import torch

from isokron.attribution.store import Schema, Store

COLUMNS = {"fc1": 12, "fc2": 10}
WIDTH = 22
SCHEMA = {"settings": {"model": "toy", "dim": 3, "seed": 0}, "columns": COLUMNS}
SCHEMA |= {"examples": 10, "examples_per_shard": 4}


def gradients(first: int, last: int, width: int = WIDTH) -> torch.Tensor:
    """Rows that say which example they are of."""
    return torch.arange(first, last)[:, None] + torch.arange(width) / 128


def begin(folder: Path, **changes) -> Store:
    return Store.begin(folder, Schema(**{**SCHEMA, **changes}))


def fill(store: Store, shards=None) -> None:
    """Write what is missing, one row an example."""
    for number, first, last in store.missing(shards):
        ids = [f"é-{k}" for k in range(first, last)]
        losses = torch.arange(first, last) / 2
        store.write(number, gradients(first, last, store.schema.width), ids, {"loss": losses})


def build(folder: Path, **changes) -> Store:
    store = begin(folder, **changes)
    fill(store)
    return store.finish()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
