"""Which rank owns which block: by cost, so that no rank works much longer than the others."""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

# Flops of an eigendecomposition, in d³ of a factor.
EIGEN_FLOPS = 10.0
# Newton–Schulz steps of route="spectral".
SPECTRAL_STEPS = 5
# From so many equal blocks and ranks on, assigning in rounds is faster than one by one.
MANY = 64


def block_cost(shape: Sequence[int], group: Mapping[str, Any], work: str = "eigen") -> float:
    """Flops of a step on a block: 2·numel·(1 + Σdᵢ) + refresh/every, dᵢ the sizes with a factor.

    `work`: how directions are found: "eigen" decomposes factors, "products" learns them by products
    (Quad, Skew), "polar" takes a polar factor (Muon).
    """
    apply = 2.0 * prod(shape) * (1 + sum(factored_sizes(shape, group, work)))
    return apply + refresh_cost(shape, group, work) / group["every"]


def refresh_cost(shape: Sequence[int], group: Mapping[str, Any], work: str = "eigen") -> float:
    """Flops of one refresh: 10·Σdᵢ³; of a polar factor, found anew in every step, those of it:
    steps·(4m²n + 2m³)."""
    if work == "polar":
        short, long = sorted([*shape, 1, 1])[-2:]
        steps = SPECTRAL_STEPS if group["route"] == "spectral" else group["steps"]
        return steps * (4.0 * short**2 * long + 2.0 * short**3)
    return EIGEN_FLOPS * sum(size**3 for size in factored_sizes(shape, group, work))


def factored_sizes(shape: Sequence[int], group: Mapping[str, Any], work: str) -> list[float]:
    """The dimensions that have a square factor."""
    if work == "polar" or (work == "products" and len(shape) < 2):
        return []
    longest = group["max_size_dense"] if work == "products" else group["max_dim"]
    return [float(size) for size in shape if longest is None or size <= longest]


def assign(costs: Sequence[float], keys: Sequence[Hashable], loads: list[float]) -> list[int]:
    """The owner of each block: the costliest first, each to the rank with the least to do.

    Blocks of one key have one owner. `loads`: the work of each rank so far, added to in place. Ties
    go to what comes first, so that all ranks assign alike.
    """
    if not len(costs):
        return []
    numbers: dict[Hashable, int] = {}
    which = [numbers.setdefault(key, len(numbers)) for key in keys]
    sums = np.bincount(which, weights=costs)
    order = np.argsort(-sums, kind="stable")
    owner = np.empty(len(sums), dtype=np.int64)
    owner[order] = _least_loaded(sums[order].tolist(), loads)
    return owner[which].tolist()


def _least_loaded(costs: Sequence[float], loads: list[float]) -> list[int]:
    """One after the other to the least loaded rank, of equally loaded ones to the first."""
    owners: list[int] = []
    heap: list[tuple[float, int]] = []
    for cost, run in groupby(costs):
        end = len(owners) + sum(1 for _ in run)
        while len(owners) < end:
            remaining = end - len(owners)
            if remaining >= MANY <= len(loads):
                served = _rounds(cost, remaining, loads)
                owners += served
                heap = [] if served else heap
                # one by one until a round may be wide again
                remaining = min(end - len(owners), len(loads))
            if remaining and not heap:
                heap = [(load, rank) for rank, load in enumerate(loads)]
                heapq.heapify(heap)
            for _ in range(remaining):
                load, rank = heap[0]
                owners.append(rank)
                loads[rank] = load + cost
                heapq.heapreplace(heap, (loads[rank], rank))
    return owners


def _rounds(cost: float, count: int, loads: list[float]) -> list[int]:
    """Owners of at most `count` equal blocks in wide rounds: one block to each rank that has less
    to do than the least loaded will have after it, in the order of their loads."""
    owners: list[int] = []
    current = np.array(loads)
    while len(owners) < count:
        order = current.argsort(kind="stable")
        ordered = current[order]
        width = int(np.searchsorted(ordered, ordered[0] + cost))
        if width < MANY:
            break
        served = order[: min(width, count - len(owners))]
        current[served] += cost
        owners += served.tolist()
    loads[:] = current.tolist()
    return owners
