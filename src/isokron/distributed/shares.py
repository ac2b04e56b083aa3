"""Who does which piece of work, by what it costs."""

from collections.abc import Sequence


def shares(costs: Sequence[float], count: int) -> list[int]:
    """The owner of every piece: the dearest first, each to whom has least to do (Graham 1969).

    Nobody has more than 4/3 of the least possible. Equal on all who call it with equal costs.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count!r}: nobody would do the work")
    loads, owners = [0.0] * count, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(count), key=lambda rank: (loads[rank], rank))
        loads[owner] += costs[i]
        owners[i] = owner
    return owners
