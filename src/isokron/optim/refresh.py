"""Schedule of refreshes, refreshes in the step or on a thread, and failed refreshes.

A block is refreshed at `start`, 2·start, 4·start, … and then every `every` steps; through `warmup`
in every step. `refresh`: "staggered", after start·2ᵏ < every blocks take turns; "together", all
blocks refresh in the same step; n, on a thread, and the result takes effect n steps later. A row
whose new operator is not finite keeps the old one, and the failure is counted.
"""

import heapq
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from isokron.distributed.block_owners import refresh_cost
from isokron.linalg import compute_alone, sent, surely_all
from isokron.linalg.precision import is_switched
from isokron.optim.blocks import Batch, BatchRow
from isokron.optim.settings import param_name, refresh_delay

logger = logging.getLogger(__name__)

State = dict[str, Tensor]
Group = Mapping[str, Any]


def is_due(turn: int, group: Group) -> bool:
    """Whether a refresh begins now: t = start, or t > start and t mod every = 0.

    Before t = every also at start·2, start·4, …: curvature changes fastest at the beginning.
    """
    if turn <= group["warmup"]:
        return turn > 0
    turn, every, delay = turn - group["warmup"], group["every"], refresh_delay(group)
    start = group["start"] or every
    if turn <= start:
        return turn == start
    # delayed refreshes would overtake each other at the doublings, or before the first has landed
    if turn < every and not delay:
        quotient, remainder = divmod(turn, start)
        return remainder == 0 and quotient & (quotient - 1) == 0
    return turn % every == 0 and (turn > start + delay or not delay)


def takes_effect(turn: int, group: Group) -> bool:
    """Whether a refresh that began `delay` steps ago takes effect now."""
    return is_due(turn - refresh_delay(group), group)


def is_under_way(turn: int, group: Group) -> bool:
    """Whether a delayed refresh has begun and has not taken effect."""
    return any(is_due(turn - ago, group) for ago in range(refresh_delay(group)))


def is_early(turn: int, group: Group) -> bool:
    """Whether there is no operator yet."""
    first = 1 if group["warmup"] else group["start"] or group["every"]
    return turn - refresh_delay(group) < first


def rows_where(condition: Callable[[int, Group], bool], turns: Tensor, group: Group) -> Tensor:
    """Whether a condition holds at each row's turn, evaluated once per distinct turn. [B]"""
    values = turns.tolist()
    answers = {turn: condition(int(turn), group) for turn in set(values)}
    return torch.tensor([answers[turn] for turn in values], dtype=torch.bool, device="cpu")


def last_common_step(group: Group) -> int:
    """The step up to which staggered blocks refresh together: warmup + start·2ᵏ, the last < every.

    Until then curvature changes fast and no block may be without an operator. The `every` steps
    after it are one round of turns, so that no block waits longer than `every` steps for its turn.
    """
    step = group["start"] or group["every"]
    while 2 * step < group["every"]:
        step *= 2
    return group["warmup"] + step


def staggered_shifts(shapes: Sequence[tuple[int, ...]], group: Group, work: str) -> list[int]:
    """By how many steps, 0 to every − 1, each block's refreshes come earlier than t mod every = 0.

    The costliest shapes come first, each block at the step with the least to do. The shifts depend
    on the shapes alone, so that a resumed run, on any number of ranks, has the same.
    """
    counts = Counter(shapes)
    costs = {shape: refresh_cost(shape, group, work) for shape in counts}
    loads = [(0.0, shift) for shift in range(min(group["every"], len(shapes)))]  # a heap
    shifts: dict[tuple[int, ...], Iterator[int]] = {}
    for shape in sorted(counts, key=lambda shape: -costs[shape]):
        chosen = []
        for _ in range(counts[shape]):
            load, shift = loads[0]
            chosen.append(shift)
            heapq.heapreplace(loads, (load + costs[shape], shift))
        # equal blocks in a row share a step: their owners differ, so that ranks work side by side
        shifts[shape] = iter(sorted(chosen))
    return [next(shifts[shape]) for shape in shapes]


class Refreshing(Protocol):
    """The part of an optimizer that makes and installs operators."""

    def refresh(self, state: State, group: Group, first: bool) -> State: ...
    def install(self, operator: State, state: State, group: Group) -> None: ...


class Outcome(NamedTuple):
    """Result of a refresh of some rows of a batch, not yet read on the host."""

    batch: Batch
    rows: Tensor  # [n]
    flags: Tensor  # [2, n]: failed, changed
    group: Group


class Refresher:
    """Refreshes the rows that are due and counts those that failed.

    A delayed refresh starts from a copy of the state and takes effect a fixed number of steps
    later, so that results do not depend on the speed of the thread. Failures are read at the next
    step, with the check of the gradients, so that a step waits for a device once.

    `failed`: number of refreshes that have failed.
    """

    def __init__(self, failed: int = 0) -> None:
        self.failed = failed
        self.unread: list[Outcome] = []
        self._error: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(
        self, method: Refreshing, batch: Batch, rows: Tensor, state: State, group: Group
    ) -> None:
        """Refresh the rows that are due, or begin to, and install what was begun earlier.

        `rows`: numbers of the rows whose state this is.
        """
        turns, delay = batch.turns(rows), refresh_delay(group)

        def install(at: Tensor, operator: State, flags: Tensor) -> None:
            """Install new operators of the rows rows[at]."""
            self.unread.append(Outcome(batch, rows[at], flags, group))
            index = _index(at, batch.device)
            selected = {key: value[index] for key, value in state.items()}
            method.install(operator, selected, group)
            if isinstance(index, slice):
                return
            for key, value in selected.items():
                if value._version:  # it has been written to
                    state[key][index] = value

        if delay:
            landing = rows_where(takes_effect, turns, group).nonzero().flatten()
            # rows that were refreshed before `refresh` became a delay have nothing to install
            begun = [int(rows[i]) in batch.jobs.keys() | batch.pending for i in landing]
            ready = landing[torch.tensor(begun, dtype=torch.bool, device="cpu")]
            if len(ready):
                install(ready, *_finished(batch, rows[ready].tolist()))
        due = rows_where(is_due, turns, group)
        # first refreshes apart: a method may decompose where it later iterates
        for first in (True, False) if bool(due.any()) else ():
            at = (due & ((batch.refreshed[rows] == 0) == first)).nonzero().flatten()
            if not len(at):
                continue
            index = _index(at, batch.device)
            due_state = {key: value[index] for key, value in state.items()}
            if delay:
                self._begin(method, batch, rows[at].tolist(), due_state, dict(group), first)
            else:
                install(at, *_refreshed(method, due_state, group, first))

    def _begin(
        self,
        method: Refreshing,
        batch: Batch,
        rows: list[int],
        state: State,
        group: Group,
        first: bool,
    ) -> None:
        """Start to refresh rows on the thread, from a copy of their state, into `batch.coming`."""
        copied = {key: value.clone() for key, value in state.items()}
        index = batch.index(rows)
        # on a device the thread has its own stream, which waits for the copies to be made
        event = None if batch.device.type == "cpu" else torch.Event(batch.device)
        if event is not None:
            event.record()

        @torch.no_grad()
        def work() -> dict[int, Tensor]:
            stream = None if event is None else torch.Stream(batch.device)
            if stream is not None and event is not None:
                stream.wait_event(event)
            with stream or nullcontext():
                operator, flags = _refreshed(method, copied, group, first)
                for key, value in operator.items():
                    batch.coming[key][index] = value.to(batch.coming[key].dtype)
            if stream is not None:
                stream.synchronize()
            return dict(zip(rows, flags.unbind(1), strict=True))

        if self._pool is None or self._process != os.getpid():  # threads do not survive a fork
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(1, "isokron-refresh", initializer=compute_alone)
        job = self._pool.submit(work)
        if is_switched():  # else the forward pass beside it would set the precision of its products
            futures.wait([job])
        batch.jobs.update(dict.fromkeys(rows, job))

    def read_outcomes(self, optimizer: str, values: Sequence[Sequence[float]]) -> None:
        """Count and log failures, given the flags of `unread` as read on the host."""
        outcomes, self.unread = self.unread, []
        for (batch, rows, _, group), flags in zip(outcomes, values, strict=True):
            failed, changed = torch.tensor(flags, device="cpu").view(2, -1).bool()
            batch.refresh_count += len(rows)
            batch.failure_count += int(failed.sum())
            batch.failures[rows] = torch.where(failed, batch.failures[rows] + 1, 0)
            batch.refreshed[rows] = torch.maximum(batch.refreshed[rows], changed.float())
            for row in rows[failed].tolist():
                self._count_failure(optimizer, batch.rows[row], int(batch.failures[row]), group)

    def _count_failure(self, optimizer: str, row: BatchRow, times: int, group: Group) -> None:
        numbers = [i for i, param in enumerate(group["params"]) if param is row.param]
        name = param_name(group, numbers[0]) if numbers else "that has left its group"
        name = f"parameter {name} (block {row.number})"
        self.failed += 1
        logger.warning("refresh of %s failed, it keeps the operator it has", name)
        if times > group["tolerated"]:
            self._error = (
                f"{optimizer}: more than tolerated={group['tolerated']} refreshes in a row failed "
                f"for {name}; raise `damping` or `eps`, lower the learning rate, or give the "
                "parameter a group with route='adamw'"
            )

    def raise_error(self) -> None:
        """Raise, once, if more refreshes in a row have failed than are tolerated."""
        error, self._error = self._error, None
        if error is not None:
            raise FloatingPointError(error)


def _index(at: Tensor, device: torch.device) -> slice | Tensor:
    """The index of rows in ascending order: a slice, and so a view, where no row is missing."""
    first, last = int(at[0]), int(at[-1])
    return slice(first, last + 1) if last - first + 1 == len(at) else sent(at, device)


def wait(batches: Sequence[Batch]) -> None:
    """Wait for all refreshes under way; their errors are raised when they take effect."""
    futures.wait({job for batch in batches for job in batch.jobs.values()})


def _finished(batch: Batch, rows: list[int]) -> tuple[State, Tensor]:
    """Wait for the refreshes of rows: their operators and outcomes."""
    # refreshes that were under way when a checkpoint was taken are in it, and count as changed
    loaded = sent(torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu"), batch.device)
    flags = [batch.jobs.pop(row).result()[row] if row in batch.jobs else loaded for row in rows]
    batch.pending -= set(rows)
    index = batch.index(rows)
    operator = {
        key: value[index].to(batch.dtype) if key in batch.formats else value[index]
        for key, value in batch.coming.items()
    }
    return operator, torch.stack(flags, 1)


def _refreshed(method: Refreshing, state: State, group: Group, first: bool) -> tuple[State, Tensor]:
    """New operators of rows, or the old ones where that failed, and the outcome. [2, n]"""
    operator = method.refresh(state, group, first)
    count, device = len(state["step"]), state["step"].device
    failed = torch.zeros(count, dtype=torch.bool, device=device)
    flat = [value.reshape(len(value), -1) for value in operator.values()]
    sums = [rows.sum(1).double() for rows in flat]
    if flat and not surely_all(torch.stack(sums).isfinite()):
        # a sum of finite numbers may overflow, so ask every number
        failed = torch.stack([~rows.isfinite().all(1) for rows in flat]).any(0)
        for key, value in operator.items():
            bad = failed.view(-1, *[1] * (value.ndim - 1))
            operator[key] = torch.where(bad, state[key].to(value.dtype), value)
    changed = torch.ones_like(failed)
    if first and flat:  # a block that has seen only zeros keeps its initial operator
        differs = [(v != state[key]).reshape(count, -1).any(1) for key, v in operator.items()]
        changed = torch.stack(differs).any(0)
    return operator, torch.stack([failed, changed]).double()
