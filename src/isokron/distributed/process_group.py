"""Collectives of a process group in which every wait has a time limit."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch import distributed as dist

TIMEOUT = 300.0  # seconds


class RankLost(RuntimeError):
    """Other ranks did not reach a collective within the timeout."""


@dataclass
class Traffic:
    """Bytes this process has sent to others, counted as an ideal ring or exchange sends them."""

    sent: int = 0


@dataclass(frozen=True)
class Ranks:
    """The processes of one group and the collectives they take part in.

    Args:
        group: a torch.distributed.ProcessGroup.
        timeout: seconds that any rank waits for the others before it raises.
        traffic: counts the bytes sent by this process.
        listed: `members` of a group that torch keeps no list of.
    """

    group: Any
    timeout: float = TIMEOUT
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    listed: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return self.listed or tuple(dist.get_process_group_ranks(self.group))

    @property
    def device(self) -> torch.device:
        """The device for small tensors that are sent: the CPU if a backend supports it."""
        types = self.group._device_types
        if not types or torch.device("cpu") in types:
            return torch.device("cpu")
        bound: torch.device | None = self.group.bound_device_id
        return bound or torch.device(types[0].type, torch.accelerator.current_device_index())

    def near(self, device: torch.device) -> torch.device:
        """The device from which tensors of `device` are sent: itself, or the CPU under gloo."""
        if device.type == "cpu" or torch.device(device.type) not in self.group._device_types:
            return self.device
        gloo = self.group._get_backend(torch.device(device.type)).name() == "gloo"
        return self.device if gloo else device

    def all_reduce_(self, tensor: Tensor, op: Any = None, what: str = "all_reduce") -> Tensor:
        """Reduce over all ranks in place, by default a sum; `what` names it in an error."""
        self.traffic.sent += sent_by_reduce(_bytes(tensor), self.size)
        self._all_reduce(tensor, op, what).wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, which have one shape. [R, ...]"""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self.all_gather_into(gathered, tensor).wait()
        return gathered

    def all_gather_into(self, gathered: Tensor, tensor: Tensor) -> "Pending":
        """Start to fill `gathered`, [R, ...], with the tensors of all ranks."""
        self.traffic.sent += sent_by_gather(_bytes(tensor), self.size)
        options = self._limited(torch._C._distributed_c10d.AllgatherOptions())
        flat = tensor.contiguous().view(-1)
        call = self._collective("all_gather_single", "_allgather_base")
        work = call(gathered.view(-1), flat, options)
        return Pending(work, "all_gather", self)

    def all_gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which may differ in the length of their first dimension."""
        counts = self.all_gather(torch.tensor([len(tensor)], device=self.device)).flatten().tolist()
        # gloo has no uneven all_gather: pad to the longest
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = self.all_gather(padded)
        return [rows[:count] for rows, count in zip(gathered, counts, strict=True)]

    def reduce_scatter_into(self, section: Tensor, tensor: Tensor, op: Any) -> "Pending":
        """Start to fill `section`, [n], with this rank's part of the reduced `tensor`, [R·n]."""
        self.traffic.sent += _bytes(section) * (self.size - 1)
        options = self._limited(dist.ReduceScatterOptions())
        options.reduceOp = op
        call = self._collective("reduce_scatter_single", "_reduce_scatter_base")
        work = call(section, tensor, options)
        return Pending(work, "reduce_scatter", self)

    def all_to_all_into(
        self,
        received: Tensor,
        sent: Tensor,
        receive_sizes: Sequence[int],
        send_sizes: Sequence[int],
    ) -> "Pending":
        """Start to send flat `sent`, split by `send_sizes`, and to fill flat `received`."""
        self.traffic.sent += (sum(send_sizes) - send_sizes[self.rank]) * sent.element_size()
        options = self._limited(dist.AllToAllOptions())
        call = self._collective("all_to_all_single", "alltoall_base")
        work = call(received, sent, list(receive_sizes), list(send_sizes), options)
        return Pending(work, "all_to_all", self)

    def broadcast_(self, tensor: Tensor, source: int) -> "Pending":
        """Start to fill `tensor` on all ranks with that of rank `source` of the group."""
        self.traffic.sent += sent_by_broadcast(_bytes(tensor), self.size)
        options = self._limited(dist.BroadcastOptions())
        options.rootRank = source
        return Pending(self.group.broadcast([tensor], options), "broadcast", self)

    def barrier(self, what: str) -> None:
        """Wait until all ranks have come here; `what` names it in an error."""
        self._all_reduce(torch.zeros(1, device=self.device), None, f"a barrier ({what})").wait()

    def agree(self, what: str, value: Any) -> None:
        """Raise on all ranks unless all have the same `value` (plain JSON)."""
        prints = self.all_gather(torch.tensor([fingerprint(value)], device=self.device))
        numbers = prints.flatten().tolist()
        if len(set(numbers)) == 1:
            return
        texts = self.gather_text(json.dumps(value, default=str))
        differs = next(r for r in range(self.size) if numbers[r] != numbers[0])
        raise RuntimeError(
            f"{what} must be the same on all {self.size} ranks, but rank {self.members[0]} has "
            f"{differing(texts[0], texts[differs])} on rank {self.members[differs]}"
        )

    def gather_text(self, text: str) -> list[str]:
        """A text of every rank."""
        encoded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        parts = self.all_gather_uneven(encoded.to(self.device))
        return [bytes(part.tolist()).decode() for part in parts]

    def _all_reduce(self, tensor: Tensor, op: Any, what: str) -> "Pending":
        options = self._limited(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.SUM if op is None else op
        return Pending(self.group.allreduce([tensor], options), what, self)

    def _collective(self, name: str, older: str) -> Any:
        """A collective of the group by its name, or by the only one in older versions of torch."""
        return getattr(self.group, name, None) or getattr(self.group, older)

    def _limited(self, options: Any) -> Any:
        # The collective itself needs the limit: gloo's threads go on after Pending.wait has raised,
        # and the process could not exit before they end, by default in 30 minutes.
        options.timeout = timedelta(seconds=self.timeout)
        if hasattr(options, "asyncOp"):  # before torch 2.8 all were asynchronous
            options.asyncOp = True
        return options


@dataclass(frozen=True)
class Pending:
    """A collective in flight."""

    work: Any
    what: str
    ranks: Ranks

    def wait(self) -> None:
        try:
            self.work.wait(timedelta(seconds=self.ranks.timeout))
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.ranks.rank} of {self.ranks.size} waited in {self.what} for ranks that "
                f"did not come within {self.ranks.timeout:g} s, or have ended: look at what the "
                f"others printed last ({str(error).splitlines()[0]})"
            ) from error


def ranks_of(group: Any = None, timeout: float = TIMEOUT) -> Ranks:
    """The ranks of a process group, by default of all processes."""
    if isinstance(group, Ranks):
        return group
    if process_count() == 0:
        raise RuntimeError(
            "there is no process group to share work in; call "
            "torch.distributed.init_process_group() first, as scripts under torchrun do"
        )
    group = dist.group.WORLD if group is None else group
    # new_group returns a negative number on ranks that are not in the group
    if isinstance(group, int) or (
        isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
    ):
        raise ValueError(
            f"group: this process (rank {dist.get_rank()}) is not in it; pass a group only on the "
            "ranks that are"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, got {type(group).__name__}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    return Ranks(group, timeout)


def process_count() -> int:
    """The world size of torch.distributed; 0 if it is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


# torch keeps the group of all ranks until destroy_process_group(), so optimizers share one
_world_controls: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_control_counts: Counter[tuple[int, ...]] = Counter()


def control_group(members: tuple[int, ...], timeout: float) -> Ranks:
    """A gloo group for small messages that cannot mix with those of DDP, checkpoints or blocks.

    `members`: sorted global ranks; all of them must call it.
    """
    make = _control_of_all if len(members) == dist.get_world_size() else _control_of_some
    try:
        return make(members, timeout)
    except RuntimeError as error:
        raise RankLost(
            f"rank {dist.get_rank()} waited for ranks {', '.join(map(str, members))} to share an "
            f"optimizer's steps, and not all came within {timeout:g} s: look at what the others "
            f"printed last ({str(error).splitlines()[0]})"
        ) from error


def _control_of_all(members: tuple[int, ...], timeout: float) -> Ranks:
    key = (dist.group.WORLD, timeout)
    group = _world_controls.get(key)
    if group is None:
        gloo = dist.is_gloo_available() and dist.get_backend() != "fake"
        limit = timedelta(seconds=timeout)
        group = _world_controls[key] = dist.new_group(
            list(members), limit, "gloo" if gloo else None
        )
    return Ranks(group, timeout)


def _control_of_some(members: tuple[int, ...], timeout: float) -> Ranks:
    # new_group(use_local_synchronization=True) names a group by how many groups a process is in;
    # where members are in different numbers of groups they would wait under different names.
    _control_counts[members] += 1
    name = f"isokron {members} {_control_counts[members]}"
    store = torch._C._distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank, size = members.index(dist.get_rank()), len(members)
    backend = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(backend)
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    group._register_backend(torch.device("cpu"), backend, gloo)
    return Ranks(group, timeout, listed=members)


def fingerprint(value: Any) -> int:
    """A 63-bit hash of a value (plain JSON)."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def differing(first: str, second: str, around: int = 40) -> str:
    """'…a… against …b…': the place where two texts begin to differ."""
    pairs = enumerate(zip(first, second, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    start = max(0, at - around)
    lead = "…" if start else ""
    parts = [lead + text[start : at + around] for text in (first, second)]
    return " against ".join(parts)


def sent_by_reduce(size: int, ranks: int) -> int:
    """Bytes each rank sends in an all-reduce of `size` bytes, as a ring: 2·size·(R−1)/R."""
    return 2 * size * (ranks - 1) // ranks


def sent_by_gather(size: int, ranks: int) -> int:
    """Bytes each rank sends in an all-gather of `size` bytes from each: size·(R−1)."""
    return size * (ranks - 1)


def sent_by_broadcast(size: int, ranks: int) -> int:
    """Bytes each rank sends on average in a broadcast of `size` bytes: all but one pass it on."""
    return size * (ranks - 1) // ranks


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
