"""How long ranks take for the batches of a group, in the order in which the engine takes them.

A rank computes what it owns of a batch, sends it, and waits for the directions of the batch before
(`Preconditioned._step_blocks`), so that at most two batches are computed at once. Where a batch is
one large block, that is two ranks, and the others wait.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class BatchWork(NamedTuple):
    """Work on the blocks of a batch: their owners and turns, [B] each, and the flops of each."""

    owners: np.ndarray
    turns: np.ndarray
    flops: float


def span(waves: Iterable[Sequence[BatchWork]], turns: int, ranks: int) -> np.ndarray:
    """Flops from the start of a step until all ranks have all directions. [turns]

    Sending takes no time, and all ranks are equally fast.
    """
    clock = np.zeros((turns, ranks))  # of each rank, where it is later than `waited`
    waited, arriving = np.zeros((2, turns))  # for all batches but the last; for the last one
    for wave in waves:
        columns = [np.unique(batch.owners, return_inverse=True) for batch in wave]
        for batch, (owners, column) in zip(wave, columns, strict=True):
            work = np.zeros((turns, len(owners)))
            np.add.at(work, (batch.turns, column), batch.flops)
            clock[:, owners] = np.maximum(clock[:, owners], waited[:, None]) + work
        for owners, _ in columns:
            sent = np.maximum(clock[:, owners].max(1), waited)
            waited, arriving = np.maximum(waited, arriving), sent
    return np.maximum(clock.max(1), arriving)
