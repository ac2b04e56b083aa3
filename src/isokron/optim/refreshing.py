"""Making operators anew, within the step or on a thread beside it, and what if it fails.

A refresh never changes an operator that works into one that does not: rows for which it comes out
non-finite keep the operator they have, and are counted.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from isokron.linalg import sent, surely_all
from isokron.linalg.threads import compute_alone
from isokron.optim.blocks import Batch, Row
from isokron.optim.cadence import due, landing, refresh_delay, rows_where
from isokron.optim.groups import param_name

logger = logging.getLogger(__name__)

State = dict[str, Tensor]
Group = Mapping[str, Any]


class Refreshing(Protocol):
    """How an optimizer makes its operators."""

    def first_refresh(self, state: State, group: Group) -> State: ...
    def refresh(self, state: State, group: Group) -> State: ...
    def install(self, fresh: State, state: State, group: Group) -> None: ...


class Unread(NamedTuple):
    """What a refresh has done to some rows of a batch, not read on the host yet."""

    batch: Batch
    rows: Tensor  # [n]
    outcome: Tensor  # [2, n]: failed, changed
    group: Group


class Refresher:
    """Refreshes the rows that are due, and keeps count of those that could not be.

    A refresh on a thread (`refresh=k`) starts from a copy of what there is when it begins,
    and counts a fixed number of steps later: how fast the thread is decides whether a step has to
    wait, and no number. Whether a refresh has failed is read at the next step, together with
    whether gradients are finite, so that a step waits for a device once at most.
    """

    def __init__(self, failed: int = 0) -> None:
        self.failed = failed
        self.error: str | None = None  # more refreshes in a row failed than are tolerated
        self.unread: list[Unread] = []
        self.pool: ThreadPoolExecutor | None = None
        self.process = 0

    def run(
        self, method: Refreshing, batch: Batch, present: Tensor, state: State, group: Group
    ) -> None:
        """Refresh or begin to, and install what was begun earlier.

        `present`: numbers of the rows whose state this is.
        """
        turns = batch.turns(present)
        if refresh_delay(group):
            ready = _numbers(rows_where(lambda turn: landing(turn, group), turns))
            if len(ready):
                fresh, outcome = _end(batch, present[ready].tolist())
                self._install(method, batch, present, ready, state, group, fresh, outcome)
        now = rows_where(lambda turn: due(turn, group), turns)
        for first in (True, False) if bool(now.any()) else ():
            at = _numbers(now & (batch.refreshed[present] != first))
            if not len(at):
                continue
            index = sent(at, batch.device)
            some = state if len(at) == len(present) else {k: v[index] for k, v in state.items()}
            if refresh_delay(group):
                self._begin(method, batch, present[at].tolist(), some, dict(group), first)
            else:
                fresh, outcome = _refreshed(method, some, group, first)
                self._install(method, batch, present, at, state, group, fresh, outcome)

    def _begin(
        self,
        method: Refreshing,
        batch: Batch,
        rows: list[int],
        state: State,
        group: Group,
        first: bool,
    ) -> None:
        """Start on these rows, whose state this is; `batch.coming` gets the result."""
        copied = {key: value.clone() for key, value in state.items()}
        index = batch.index(rows)
        begun = None if batch.device.type == "cpu" else torch.Event(batch.device)
        if begun is not None:
            begun.record()

        def finish() -> dict[int, Tensor]:
            fresh, outcome = _refreshed(method, copied, group, first)
            for key, value in fresh.items():
                batch.coming[key][index] = value.to(batch.coming[key].dtype)
            return dict(zip(rows, outcome.unbind(1), strict=True))

        @torch.no_grad()
        def work() -> dict[int, Tensor]:
            if begun is None:
                return finish()
            stream = torch.Stream(batch.device)
            stream.wait_event(begun)
            with stream:
                outcomes = finish()
            stream.synchronize()
            return outcomes

        if self.pool is None or self.process != os.getpid():  # a fork has no threads but its own
            self.process = os.getpid()
            self.pool = ThreadPoolExecutor(1, "isokron-refresh", initializer=compute_alone)
        batch.jobs.update(dict.fromkeys(rows, self.pool.submit(work)))

    def _install(
        self,
        method: Refreshing,
        batch: Batch,
        present: Tensor,
        at: Tensor,
        state: State,
        group: Group,
        fresh: State,
        outcome: Tensor,
    ) -> None:
        """Install new operators of the rows present[at]."""
        self.unread.append(Unread(batch, present[at], outcome, group))
        if len(at) == len(present):
            method.install(fresh, state, group)
            return
        index = sent(at, batch.device)
        some = {key: value[index] for key, value in state.items()}
        method.install(fresh, some, group)
        for key, value in state.items():
            value[index] = some[key]

    def note(self, optimizer: str, outcomes: Sequence[Sequence[float]]) -> None:
        """Count and log failures, given the values of what was unread, in its order."""
        read, self.unread = self.unread, []
        for (batch, rows, _, group), values in zip(read, outcomes, strict=True):
            failed, changed = torch.tensor(values, device="cpu").view(2, -1).bool()
            batch.failures[rows] = torch.where(failed, batch.failures[rows] + 1, 0)
            batch.refreshed[rows] |= changed
            for row in rows[failed].tolist():
                self._note_failure(optimizer, batch.rows[row], int(batch.failures[row]), group)

    def _note_failure(self, optimizer: str, row: Row, times: int, group: Group) -> None:
        found = [i for i, param in enumerate(group["params"]) if param is row.param]
        name = param_name(group, found[0]) if found else "that has left its group"
        name = f"parameter {name} (block {row.number})"
        self.failed += 1
        logger.warning("refresh of %s failed, it keeps the operator it has", name)
        if times > group["tolerated"]:
            self.error = (
                f"{optimizer}: more than tolerated={group['tolerated']} refreshes in a row failed "
                f"for {name}; raise `damping` or `eps`, lower the learning rate, or give the "
                "parameter a group with route='adamw'"
            )

    def raise_error(self) -> None:
        """Raise for what `note` found to be intolerable, once."""
        error, self.error = self.error, None
        if error is not None:
            raise FloatingPointError(error)


def _numbers(rows: Tensor) -> Tensor:
    """Of the rows that are true."""
    return rows.nonzero().flatten()


def wait(batches: Sequence[Batch]) -> None:
    """Until every refresh that has begun is done. An error is raised when its turn has come."""
    futures.wait({job for batch in batches for job in batch.jobs.values()})


def _end(batch: Batch, rows: list[int]) -> tuple[State, Tensor]:
    """Wait for rows of a batch: their operators, and what their refreshes have done."""
    # a row without a job was finished when a checkpoint was taken, and counts as changed
    finished = sent(torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu"), batch.device)
    outcomes = [
        batch.jobs.pop(row).result()[row] if row in batch.jobs else finished for row in rows
    ]
    index = batch.index(rows)
    fresh = {key: value[index] for key, value in batch.coming.items()}
    return fresh, torch.stack(outcomes, 1)


def _refreshed(method: Refreshing, state: State, group: Group, first: bool) -> tuple[State, Tensor]:
    """A new operator of every row, or where it failed the one it had; and the outcome. [2, n]

    `first`: rows that have the operator of `init_state`; whether they get another is in the
    outcome, while rows that have been refreshed once count as such.
    """
    fresh = method.first_refresh(state, group) if first else method.refresh(state, group)
    count = len(state["step"])
    device = state["step"].device
    failed = torch.zeros(count, dtype=torch.bool, device=device)
    rows = [value.reshape(len(value), -1) for value in fresh.values()]
    sums = [each.sum(1).double() for each in rows]
    if rows and not surely_all(torch.stack(sums).isfinite()):
        # a sum of finite numbers may overflow, so now every number is asked
        failed = torch.stack([~each.isfinite().all(1) for each in rows]).any(0)
        for key, value in fresh.items():
            bad = failed.view(-1, *[1] * (value.ndim - 1))
            fresh[key] = torch.where(bad, state[key].to(value.dtype), value)
    changed = torch.ones_like(failed)
    if first and rows:
        differs = [(value != state[key]).reshape(count, -1).any(1) for key, value in fresh.items()]
        changed = torch.stack(differs).any(0)
    return fresh, torch.stack([failed, changed]).double()
