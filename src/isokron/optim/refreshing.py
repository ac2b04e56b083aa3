"""Making operators anew, within the step or on a thread beside it, and what if it fails.

A refresh never changes an operator that works into one that does not: rows for which it comes out
non-finite keep the operator they have, and are counted.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from isokron.linalg.threads import compute_alone
from isokron.optim.blocks import Batch

State = dict[str, Tensor]
Refresh = Callable[[State], State]


def settled(refresh: Refresh, state: State) -> tuple[State, list[bool]]:
    """A new operator of every row, or where it failed the one it had; and which have failed."""
    fresh = refresh(state)
    sums = [value.flatten(1).sum(1, dtype=torch.float64) for value in fresh.values()]
    if not sums:
        return fresh, [False] * len(state["step"])
    failed = ~torch.stack(sums).isfinite().all(0)
    if bool(failed.any()):
        for key, value in fresh.items():
            rows = failed.view(-1, *[1] * (value.ndim - 1))
            fresh[key] = torch.where(rows, state[key].to(value.dtype), value)
    return fresh, failed.tolist()


class Worker:
    """One thread at a time that refreshes beside the training steps, in the order of asking.

    What a refresh starts from is copied when it begins, and its result counts a fixed number of
    steps later: how fast the thread is changes when a step has to wait, and no number.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "isokron-refresh", initializer=compute_alone)

    def begin(self, batch: Batch, rows: Sequence[int], state: State, refresh: Refresh) -> None:
        """Start on these rows of the batch, whose state this is; `batch.coming` gets the result."""
        at = torch.tensor(rows, device=batch.device)
        copied = {key: value.clone() for key, value in state.items()}
        begun = None if batch.device.type == "cpu" else torch.Event(batch.device)
        if begun is not None:
            begun.record()

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

        def finish() -> dict[int, bool]:
            fresh, failed = settled(refresh, copied)
            for key, value in fresh.items():
                batch.coming[key][at] = value.to(batch.coming[key].dtype)
            return dict(zip(rows, failed, strict=True))

        job = self.pool.submit(work)
        batch.jobs.update(dict.fromkeys(rows, job))

    @staticmethod
    def end(batch: Batch, rows: Sequence[int]) -> tuple[State, list[bool]]:
        """Wait for these rows: their operators, and which failed."""
        # a row without a job was finished when a checkpoint was taken
        failed = [batch.jobs.pop(row).result()[row] if row in batch.jobs else False for row in rows]
        at = torch.tensor(rows, device=batch.device)
        return {key: value[at] for key, value in batch.coming.items()}, failed
