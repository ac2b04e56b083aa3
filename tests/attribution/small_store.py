"""A small gradient store, made again and again: the same call gives the same bytes."""

from pathlib import Path

import torch

from isokron.attribution.store import Store, StoreWriter

COLUMNS = {"fc1": (3, 4), "fc2": (1, 5, 2)}
WIDTH = 22
SCHEMA = {"settings": {"model": "toy", "projection": {"dim": 3, "seed": 0}}, "columns": COLUMNS}
SCHEMA |= {"examples": 10, "examples_per_shard": 4}


def gradients(first: int, last: int, width: int = WIDTH) -> torch.Tensor:
    """Rows that say which example they are of."""
    return torch.arange(first, last)[:, None] + torch.arange(width) / 128


def fill(writer: StoreWriter, shards=None) -> None:
    """Write what is missing, one row an example."""
    for number, first, last in writer.missing(shards):
        writer.write(
            number,
            gradients(first, last, writer.schema.width),
            ids=[f"é-{k}" for k in range(first, last)],
            extra={"loss": torch.arange(first, last) / 2},
        )


def build(folder: Path, **changes) -> Store:
    writer = StoreWriter.open(folder, **{**SCHEMA, **changes})
    fill(writer)
    return writer.finish()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
