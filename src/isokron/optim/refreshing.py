"""Making operators anew, within the step or on a thread beside it, and what if it fails.

A refresh never changes an operator that works into one that does not: rows for which it comes out
non-finite keep the operator they have, and are counted.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from isokron.linalg.threads import compute_alone
from isokron.optim.blocks import Batch, Row
from isokron.optim.cadence import due, landing
from isokron.optim.groups import param_name

logger = logging.getLogger(__name__)

State = dict[str, Tensor]
Group = Mapping[str, Any]


class Refreshing(Protocol):
    """How an optimizer makes its operators."""

    def refresh(self, state: State, group: Group) -> State: ...
    def install(self, fresh: State, state: State, group: Group) -> None: ...


class Refresher:
    """Refreshes the rows that are due, and keeps count of those that could not be.

    A refresh that may take its time (`delay`) starts from a copy of what there is when it begins,
    and counts a fixed number of steps later: how fast the thread is decides whether a step has to
    wait, and no number.
    """

    def __init__(self, failed: int = 0) -> None:
        self.failed = failed
        self.pool: ThreadPoolExecutor | None = None
        self.process = 0

    def run(
        self, method: Refreshing, batch: Batch, present: list[int], state: State, group: Group
    ) -> None:
        """Refresh or begin to, and install what was begun earlier. state: of the rows present."""
        turns = [(i, int(batch.step[row]), batch.phase[row]) for i, row in enumerate(present)]
        if group["delay"]:
            ready = [i for i, step, phase in turns if landing(step, phase, group)]
            if ready:
                self._install(
                    method, batch, present, ready, state, group, *_end(batch, present, ready)
                )
        now = [i for i, step, phase in turns if due(step, phase, group)]
        if not now:
            return
        some = state if len(now) == len(present) else {k: v[now] for k, v in state.items()}
        if group["delay"]:
            self._begin(method, batch, [present[i] for i in now], some, dict(group))
        else:
            fresh, failed = _settled(method, some, group)
            self._install(method, batch, present, now, state, group, fresh, failed)

    def _begin(
        self, method: Refreshing, batch: Batch, rows: list[int], state: State, group: Group
    ) -> None:
        """Start on these rows, whose state this is; `batch.coming` gets the result."""
        copied = {key: value.clone() for key, value in state.items()}
        begun = None if batch.device.type == "cpu" else torch.Event(batch.device)
        if begun is not None:
            begun.record()

        def finish() -> dict[int, bool]:
            fresh, failed = _settled(method, copied, group)
            for key, value in fresh.items():
                batch.coming[key][rows] = value.to(batch.coming[key].dtype)
            return dict(zip(rows, failed, strict=True))

        @torch.no_grad()
        def work() -> dict[int, bool]:
            if begun is None:
                return finish()
            stream = torch.Stream(batch.device)
            stream.wait_event(begun)
            with stream:
                failed = finish()
            stream.synchronize()
            return failed

        if self.pool is None or self.process != os.getpid():  # a fork has no threads but its own
            self.process = os.getpid()
            self.pool = ThreadPoolExecutor(1, "isokron-refresh", initializer=compute_alone)
        batch.jobs.update(dict.fromkeys(rows, self.pool.submit(work)))

    def _install(
        self,
        method: Refreshing,
        batch: Batch,
        present: list[int],
        at: list[int],
        state: State,
        group: Group,
        fresh: State,
        failed: list[bool],
    ) -> None:
        """Install new operators of the rows present[at], and count those that failed."""
        for i, bad in zip(at, failed, strict=True):
            row = present[i]
            batch.failures[row] = batch.failures[row] + 1 if bad else 0
            if bad:
                self._note_failure(
                    type(method).__name__, batch.rows[row], batch.failures[row], group
                )
        if len(at) == len(present):
            method.install(fresh, state, group)
            return
        some = {key: value[at] for key, value in state.items()}
        method.install(fresh, some, group)
        for key, value in state.items():
            value[at] = some[key]

    def _note_failure(self, optimizer: str, row: Row, times: int, group: Group) -> None:
        index = next(i for i, param in enumerate(group["params"]) if param is row.param)
        name = f"parameter {param_name(group, index)} (block {row.number})"
        self.failed += 1
        logger.warning("refresh of %s failed, it keeps the operator it has", name)
        if times > group["tolerated"]:
            raise FloatingPointError(
                f"{optimizer}: more than tolerated={group['tolerated']} refreshes in a row failed "
                f"for {name}; raise `damping` or `eps`, lower the learning rate, or give the "
                "parameter a group with route='adamw'"
            )


def wait(batches: Sequence[Batch]) -> None:
    """Until every refresh that has begun is done. An error is raised when its turn has come."""
    futures.wait({job for batch in batches for job in batch.jobs.values()})


def _end(batch: Batch, present: list[int], at: list[int]) -> tuple[State, list[bool]]:
    """Wait for the rows present[at]: their operators, and which failed."""
    rows = [present[i] for i in at]
    # a row without a job was finished when a checkpoint was taken
    failed = [batch.jobs.pop(row).result()[row] if row in batch.jobs else False for row in rows]
    return {key: value[rows] for key, value in batch.coming.items()}, failed


def _settled(method: Refreshing, state: State, group: Group) -> tuple[State, list[bool]]:
    """A new operator of every row, or where it failed the one it had; and which have failed."""
    fresh = method.refresh(state, group)
    rows = [value.reshape(len(value), -1) for value in fresh.values()]
    if not rows:
        return fresh, [False] * len(state["step"])
    failed = ~torch.stack([each.sum(1).double() for each in rows]).isfinite().all(0)
    if bool(failed.any()):  # or a sum of finite numbers is not one itself
        failed = torch.stack([~each.isfinite().all(1) for each in rows]).any(0)
    if bool(failed.any()):
        for key, value in fresh.items():
            bad = failed.view(-1, *[1] * (value.ndim - 1))
            fresh[key] = torch.where(bad, state[key].to(value.dtype), value)
    return fresh, failed.tolist()
