"""Rows that are written in any order, and more than once, before they become a store."""

import os
from pathlib import Path

import torch
from torch import Tensor

from isokron.files import FULL


class Scratch:
    """Rows [examples, width] in a mapped file, of which the system keeps in memory what it can.

    `seen`: [examples], how often each was written.
    """

    def __init__(self, path: Path, examples: int, width: int) -> None:
        self.path = path
        size = 4 * examples * width
        path.unlink(missing_ok=True)  # of a training that was killed
        with path.open("wb") as file:
            _reserve(file.fileno(), size, path)
        flat = torch.from_file(str(path), shared=True, size=examples * width, dtype=torch.float32)
        self.rows = flat.view(examples, width)
        self.seen = torch.zeros(examples, dtype=torch.int64)

    def put(self, numbers: Tensor, rows: Tensor) -> None:
        """Write over what is there; of equal numbers the last stays."""
        for number, row in zip(numbers.tolist(), rows, strict=True):
            self.rows[number] = row
        self._count(numbers)

    def add(self, numbers: Tensor, rows: Tensor) -> None:
        for number, row in zip(numbers.tolist(), rows, strict=True):
            self.rows[number] += row
        self._count(numbers)

    def close(self) -> None:
        """Remove the file."""
        self.rows = torch.empty(0, self.rows.size(1))
        self.path.unlink(missing_ok=True)

    def _count(self, numbers: Tensor) -> None:
        self.seen.index_add_(0, numbers, torch.ones_like(numbers))


def _reserve(file: int, size: int, path: Path) -> None:
    """Zeros, with their place on the disk: a mapped file that finds none kills its process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in FULL:
            raise
        raise OSError(
            f"could not reserve {size / 1e6:,.1f} MB for {str(path)!r}; free some space, or "
            "project gradients to fewer dimensions"
        ) from None
