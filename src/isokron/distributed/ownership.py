"""Who owns which block: by cost, so that no rank works much longer than the others."""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

# Flops of one refresh, in d³ of a factor: an eigendecomposition is about so many products.
REFRESH = 10.0
# Newton–Schulz steps of route="spectral"
SPECTRAL_STEPS = 5
# From so many equal blocks or ranks on it pays to serve all ranks that are next at once.
MANY = 64


def block_cost(shape: Sequence[int], group: Mapping[str, Any], work: str = "eigen") -> float:
    """Flops of a step on a block: applying a factor a dimension, and refreshing it now and then.

    2·numel·(1 + Σdᵢ) + refresh/every, over dimensions that have a factor. `work`: how directions
    are found: "eigen" decomposes factors, "products" learns them by products (Quad, Skew), "polar"
    takes a polar factor (Muon).
    """
    apply = 2.0 * prod(shape) * (1 + sum(factored(shape, group, work)))
    return apply + refresh_cost(shape, group, work) / group["every"]


def refresh_cost(shape: Sequence[int], group: Mapping[str, Any], work: str = "eigen") -> float:
    """Flops of one refresh: 10·Σdᵢ³ over dimensions that have a factor.

    Where the direction is a polar factor, found anew in each of its steps: steps·(4m²n + 2m³).
    """
    if work == "polar":
        short, long = sorted([*shape, 1, 1])[-2:]
        steps = SPECTRAL_STEPS if group["route"] == "spectral" else group["steps"]
        return steps * (4.0 * short**2 * long + 2.0 * short**3)
    return REFRESH * sum(size**3 for size in factored(shape, group, work))


def factored(shape: Sequence[int], group: Mapping[str, Any], work: str) -> list[float]:
    """The dimensions that have a square factor."""
    if work == "polar" or (work == "products" and len(shape) < 2):
        return []
    longest = group["max_size_dense"] if work == "products" else group["max_dim"]
    return [float(size) for size in shape if longest is None or size <= longest]


def assign(costs: Sequence[float], together: Sequence[Hashable], loads: list[float]) -> list[int]:
    """The owner of each block: the costliest first, each to the rank with the least to do.

    `together`: blocks of one key have one owner. `loads`: what each rank has to do already, added
    to in place. Ties go to what comes first, so that all ranks assign alike.
    """
    if not len(costs):
        return []
    index: dict[Hashable, int] = {}
    which = [index.setdefault(key, len(index)) for key in together]
    sums = np.bincount(which, weights=costs)
    order = np.argsort(-sums, kind="stable")  # equals stay in order
    owner = np.empty(len(sums), dtype=np.int64)
    owner[order] = _least_loaded(sums[order].tolist(), loads)
    return owner[which].tolist()


def _least_loaded(costs: Sequence[float], loads: list[float]) -> list[int]:
    """One after the other, to the least loaded, of equally loaded ranks to the first."""
    owners: list[int] = []
    heap: list[tuple[float, int]] = []
    for cost, run in groupby(costs):
        end = len(owners) + sum(1 for _ in run)
        while len(owners) < end:
            left = end - len(owners)
            if left >= MANY <= len(loads):
                served = _rounds(cost, left, loads)
                owners += served
                heap = [] if served else heap
                left = min(end - len(owners), len(loads))  # until rounds may be wide again
            if left and not heap:
                heap = [(load, rank) for rank, load in enumerate(loads)]
                heapq.heapify(heap)
            for _ in range(left):
                load, rank = heap[0]
                owners.append(rank)
                loads[rank] = load + cost
                heapq.heapreplace(heap, (loads[rank], rank))
    return owners


def _rounds(cost: float, count: int, loads: list[float]) -> list[int]:
    """Owners of at most `count` equal blocks, by rounds that are wide: to all who have less to do
    than the least loaded will have after its next, in the order of their loads."""
    owners: list[int] = []
    now = np.array(loads)
    while len(owners) < count:
        order = now.argsort(kind="stable")
        sorted_loads = now[order]
        wide = int(np.searchsorted(sorted_loads, sorted_loads[0] + cost))
        served = order[: min(wide, count - len(owners))]
        if wide < MANY:
            break
        now[served] += cost
        owners += served.tolist()
    loads[:] = now.tolist()
    return owners
