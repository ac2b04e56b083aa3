"""A large batch in chunks that stay in a processor's cache."""

import math
from collections.abc import Callable
from typing import Any

import jax

# Of the largest array a chunk has. A step makes about fourteen products of the same blocks, and out
# of the cache it takes about a quarter less time than out of memory. Half as many entries make
# little difference.
ENTRIES = 1 << 18


def chunk_rows(rows: int, entries: int) -> int:
    """How many of the rows, of so many entries each, to work on at a time: a divisor of them.

    All of them where no divisor comes near what the cache holds, and on a GPU or TPU, which a loop
    would leave idle.
    """
    fit = max(1, ENTRIES // max(1, entries))
    if fit >= rows or jax.default_backend() != "cpu":
        return rows
    found = max(each for each in range(1, fit + 1) if rows % each == 0)
    return found if 4 * found >= fit else rows


def in_chunks(function: Callable[[Any], Any], batch: Any, size: int) -> Any:
    """function(batch), `size` rows at a time. All arrays have rows first, and as many of them."""
    chunks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(function, chunks))


def largest_entries(arrays: Any) -> int:
    """Of the largest array of one row."""
    return max(math.prod(each.shape[1:]) for each in jax.tree.leaves(arrays))
