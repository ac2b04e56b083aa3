"""Who owns which block: by cost, so that no rank works much longer than the others."""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

# Flops of one refresh, in d³ of a factor: an eigendecomposition is about so many products.
REFRESH = 10.0


def block_cost(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """Flops of a step on a block: applying a factor a dimension, and refreshing it now and then.

    2·numel·Σdᵢ + 10·Σdᵢ³/every, over dimensions that are short enough to have a factor.
    """
    longest = group["max_dim"] or max(shape, default=1)
    sides = [float(size) for size in shape if size <= longest]
    apply = 2.0 * prod(shape) * (1 + sum(sides))
    return apply + REFRESH * sum(size**3 for size in sides) / group["every"]


def assign(costs: Sequence[float], together: Sequence[Hashable], loads: list[float]) -> list[int]:
    """The owner of each block: the costliest first, each to the rank with the least to do.

    `together`: blocks of one key have one owner. `loads`: what each rank has to do already, added
    to in place. Ties go to what comes first, so that all ranks assign alike.
    """
    sums: dict[Hashable, float] = {}
    for key, cost in zip(together, costs, strict=True):
        sums[key] = sums.get(key, 0.0) + cost
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owner = {}
    for key in sorted(sums, key=lambda key: -sums[key]):  # stable: equals stay in order
        load, rank = heap[0]
        owner[key] = rank
        loads[rank] = load + sums[key]
        heapq.heapreplace(heap, (loads[rank], rank))
    return [owner[key] for key in together]
