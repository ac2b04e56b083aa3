"""Batches of bounded size: what a step needs besides its state is some times one wave of them."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from isokron.distributed.ownership import factored


def row_size(shape: Sequence[int], group: Mapping[str, Any], work: str) -> int:
    """Elements of a block or of its factors, whichever are more."""
    return max(prod(shape), int(sum(size**2 for size in factored(shape, group, work))))


def waves_of(
    keys: Sequence[np.ndarray], sizes: Sequence[int], most: int, together: str
) -> list[np.ndarray]:
    """For every row of every batch the number of its wave.

    `keys`: of every row, equal for those that are in one wave, in the order of their parameters.
    `sizes`: of a row of each batch. `most`: elements of a wave, or one key's rows. `together`:
    where it is "block", batches are cut each by itself, and else all at the same keys.
    """
    if together == "block":
        return [
            np.arange(len(k)) // max(1, most // size) for k, size in zip(keys, sizes, strict=True)
        ]
    if not keys:
        return []
    every, which = np.unique(np.concatenate(keys), return_inverse=True)
    weights = np.concatenate([np.full(len(k), size) for k, size in zip(keys, sizes, strict=True)])
    totals = np.bincount(which, weights=weights, minlength=len(every))

    def next_wave(before: tuple[int, float], size: float) -> tuple[int, float]:
        wave, filled = before
        return (wave, filled + size) if filled + size <= most else (wave + 1, size)

    numbers = np.array([wave for wave, _ in accumulate(totals, next_wave, initial=(0, 0.0))][1:])
    return np.split(numbers[which], np.cumsum([len(k) for k in keys])[:-1])
