"""A process that torchrun started joins the others, and leaves with them."""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from isokron.distributed.process_group import Ranks
from isokron.distributed.rank_tasks import RankFailed

TIMEOUT = 3600.0  # seconds: one rank may train or write while all others wait
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMPLAINTS, ENDED, LEFT = "isokron/complaints", "isokron/ended", "isokron/left"
LINGER = 5.0  # seconds


@dataclass(frozen=True, eq=False)
class Launched:
    """The ranks of one launch, and the store by which they have met."""

    ranks: Ranks
    store: Store
    size: int

    def speaks(self, error: BaseException | None = None) -> bool:
        """Whether it is for this rank to tell of an error: one does, and not one that only has
        lost another which has its own to tell of."""
        if isinstance(error, RankFailed):
            return False
        try:
            return self.store.add(COMPLAINTS, 1) == 1
        except RuntimeError:  # whoever kept the store is gone
            return True

    def give_up(self) -> None:
        """After an error. The store of ranks that were started by hand lives in the first of them,
        which stays a moment until the others have asked whether they are to speak."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._note(ENDED, wait=self.ranks.rank == 0 and not agents)

    def leave(self) -> None:
        """When all have done their work; nobody hangs up while others still listen."""
        self.ranks.barrier("the end")
        dist.destroy_process_group()
        self._note(LEFT, wait=True)

    def _note(self, what: str, wait: bool) -> None:
        """Write down that this rank has come so far, and `wait` a moment for the others to."""
        with suppress(RuntimeError):  # whoever kept the store is gone
            count, end = self.store.add(what, 1), time.monotonic() + LINGER
            while wait and count < self.size and time.monotonic() < end:
                time.sleep(0.05)
                count = self.store.add(what, 0)


def join(env: Mapping[str, str] = os.environ, timeout: float | None = None) -> Launched | None:
    """The ranks that torchrun, or whoever set its variables, started this process as one of; None
    for one that is alone. `timeout`: seconds; by default ISOKRON_TIMEOUT, or an hour."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        if not re.fullmatch(r"\d*", env.get(name, "")):
            raise ValueError(
                f"{name} must be a whole number, got {env[name]!r}; start isokron by: torchrun "
                "--nproc-per-node N -m isokron ..., or unset it"
            )
    if int(env.get("WORLD_SIZE") or 1) <= 1:
        return None
    missing = [name for name in NEEDED if name not in env]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {env['WORLD_SIZE']}, but {', '.join(missing)} is not set; start "
            "isokron by: torchrun --nproc-per-node N -m isokron ..., or unset WORLD_SIZE"
        )
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    seconds = float(env.get("ISOKRON_TIMEOUT", TIMEOUT)) if timeout is None else timeout
    if torch.cuda.is_available():
        torch.cuda.set_device(int(env.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    wait = timedelta(seconds=seconds)
    store, rank, size = next(rendezvous("env://", rank, size, timeout=wait))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore("isokron", store),
        rank=rank,
        world_size=size,
        timeout=wait,
    )
    return Launched(Ranks(dist.group.WORLD, seconds), store, size)
