"""Wait until all ranks have made a call, and name those that have not.

`if rank == 0: torch.save(optimizer.state_dict(), …)` is what scripts without shared state write: a
call that needs all ranks is easily made by one alone, and a collective could not tell who is late.
"""

import logging
import time
from collections.abc import Sequence

from torch import distributed as dist

from isokron.distributed.process_group import RankLost, fingerprint

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds after which a rank says for whom it waits
LISTED = 8  # ranks that a message names


def longest_wait(timeout: float) -> float:
    """Seconds to wait for a call where a step may take `timeout`: 30 of the default of 300."""
    return min(timeout, max(30.0, timeout / 10))


def attend(members: Sequence[int], timeout: float, call: str, remedy: str) -> None:
    """Return once all of `members`, global ranks, have made this call as often as this rank.

    It compares counters in the store of the process group, so that no group is left in the middle
    of a collective by a rank that gives up.

    Args:
        members: global ranks, this one among them.
        timeout: of a step, in seconds.
        call: what they call, as in an error.
        remedy: what to do where only some ranks call it.
    """
    if dist.get_backend() == "fake":  # a process group for dry runs, whose other ranks do not exist
        return
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    name = f"isokron {call} {fingerprint(list(members))}"
    calls = store.add(f"{name} of {me}", 1)
    complete = f"{name} complete {calls}"
    if store.add(name, 1) == calls * len(members):
        store.set(complete, "")
        store.delete_key(f"{name} complete {calls - 1}")  # all have passed it
    limit = longest_wait(timeout)
    start, pause, warned = time.monotonic(), 0.001, False
    while not store.check([complete]):
        waited = time.monotonic() - start
        if (waited > min(limit, PATIENCE) and not warned) or waited > limit:
            late = [rank for rank in members if store.add(f"{name} of {rank}", 0) < calls]
            names = ", ".join(map(str, late[:LISTED])) + (" and more" if late[LISTED:] else "")
            who = f"rank {me} has waited {waited:.0f} s in {call} for rank {names}; {remedy}"
            if waited > limit:
                store.add(f"{name} of {me}", -1)
                store.add(name, -1)
                raise RankLost(who)
            logger.warning(who)
            warned = True
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
