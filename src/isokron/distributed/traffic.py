"""What collectives send, in plain numbers: for those who count it and those who foresee it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod


def sent_by_reduce(size: int, ranks: int) -> int:
    """Bytes each rank gives to others where all sum `size` bytes: 2·size·(R−1)/R, in a ring."""
    return 2 * size * (ranks - 1) // ranks


def sent_by_gather(size: int, ranks: int) -> int:
    """Bytes each rank gives where everybody gets the `size` bytes of everybody: size·(R−1)."""
    return size * (ranks - 1)


def padded_rows(owners: Iterable[int]) -> int:
    """Blocks that every rank sends, so that all send as many as the one that owns most."""
    return max(Counter(owners).values(), default=0)


def padded_part(shape: Sequence[int], ranks: int) -> int:
    """Elements of the largest of R parts of a parameter, cut along its first dimension."""
    return -(-shape[0] // ranks) * prod(shape[1:])
