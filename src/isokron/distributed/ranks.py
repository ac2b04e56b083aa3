"""The processes that share work, and what travels between them: every wait has an end."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from isokron.distributed.traffic import sent_by_gather, sent_by_reduce

TIMEOUT = 300.0  # seconds


class Gone(RuntimeError):
    """Other ranks did not come to where this one waited for them."""


@dataclass
class Traffic:
    """Bytes this process has given to others, as an ideal ring or exchange would send them."""

    sent: int = 0


@dataclass(frozen=True)
class Ranks:
    """The processes of one group: which of them this is, and the collectives they take part in.

    `timeout`: seconds any of them waits for the others before it raises.
    """

    group: Any  # a torch.distributed.ProcessGroup
    timeout: float = TIMEOUT
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    listed: tuple[int, ...] = ()  # `members` of a group that torch has no list of

    @property
    def rank(self) -> int:
        """This process, counted in the group."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    @property
    def members(self) -> tuple[int, ...]:
        """Every rank of the group, counted among all processes."""
        return self.listed or tuple(dist.get_process_group_ranks(self.group))

    @property
    def device(self) -> torch.device:
        """Where small tensors that travel have to be: on the host if the group can send from it."""
        kinds = self.group._device_types
        if not kinds or torch.device("cpu") in kinds:
            return torch.device("cpu")
        here: torch.device | None = self.group.bound_device_id
        return here or torch.device(kinds[0].type, torch.accelerator.current_device_index())

    def near(self, device: torch.device) -> torch.device:
        """Where tensors of a device have to be to travel: there if the group has a way for it,
        NCCL for CUDA; gloo's is the host."""
        if device.type == "cpu" or torch.device(device.type) not in self.group._device_types:
            return self.device
        gloo = self.group._get_backend(torch.device(device.type)).name() == "gloo"
        return self.device if gloo else device

    def all_reduce_(self, tensor: Tensor, op: Any = None, what: str = "all_reduce") -> Tensor:
        """Everybody's sum (or what `op` says), in place; `what`: for what, in an error."""
        self.traffic.sent += sent_by_reduce(_bytes(tensor), self.size)
        self._all_reduce(tensor, op, what).wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Everybody's tensors, which all have one shape, by rank. [R, ...]"""
        everything = tensor.new_empty(self.size, *tensor.shape)
        self.all_gather_into(everything, tensor).wait()
        return everything

    def all_gather_into(self, everything: Tensor, tensor: Tensor) -> "Pending":
        """Begin to fill `everything`, [R, ...], with the tensors of all."""
        self.traffic.sent += sent_by_gather(_bytes(tensor), self.size)
        options = self._limited(torch._C._distributed_c10d.AllgatherOptions())
        flat = tensor.contiguous().view(-1)
        work = self.group.all_gather_single(everything.view(-1), flat, options)
        return Pending(work, "all_gather", self)

    def all_gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensors, which may differ in the length of their first dimension."""
        counts = self.all_gather(torch.tensor([len(tensor)], device=self.device)).flatten().tolist()
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        everything = self.all_gather(padded)
        return [rows[:count] for rows, count in zip(everything, counts, strict=True)]

    def reduce_scatter_into(self, own: Tensor, tensor: Tensor, op: Any) -> "Pending":
        """Begin to fill `own`, [n], with this rank's part of everybody's sum of `tensor`, [R·n]."""
        self.traffic.sent += _bytes(own) * (self.size - 1)
        options = self._limited(dist.ReduceScatterOptions())
        options.reduceOp = op
        work = self.group.reduce_scatter_single(own, tensor, options)
        return Pending(work, "reduce_scatter", self)

    def all_to_all_into(
        self, received: Tensor, sent: Tensor, of_each: Sequence[int], to_each: Sequence[int]
    ) -> "Pending":
        """Begin to send flat `sent`, cut by `to_each`, and to fill `received`, cut by `of_each`."""
        own = to_each[self.rank]
        self.traffic.sent += (sum(to_each) - own) * sent.element_size()
        options = self._limited(dist.AllToAllOptions())
        work = self.group.all_to_all_single(received, sent, list(of_each), list(to_each), options)
        return Pending(work, "all_to_all", self)

    def barrier(self, what: str) -> None:
        """Until all have come here; `what`: for what, in an error."""
        self._all_reduce(torch.zeros(1, device=self.device), None, f"a barrier ({what})").wait()

    def agree(self, what: str, value: Any) -> None:
        """Raise, on all ranks, unless all have the same `value` (plain JSON)."""
        mine = fingerprint(value)
        everyone = self.all_gather(torch.tensor([mine], device=self.device)).flatten().tolist()
        if len(set(everyone)) == 1:
            return
        texts = self.gather_text(json.dumps(value, default=str))
        other = next(r for r in range(self.size) if everyone[r] != everyone[0])
        raise RuntimeError(
            f"{what} must be the same on all {self.size} ranks, but rank {self.members[0]} has "
            f"{differing(texts[0], texts[other])} on rank {self.members[other]}"
        )

    def gather_text(self, text: str) -> list[str]:
        """A text of every rank."""
        coded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        parts = self.all_gather_uneven(coded.to(self.device))
        return [bytes(part.tolist()).decode() for part in parts]

    def _all_reduce(self, tensor: Tensor, op: Any, what: str) -> "Pending":
        options = self._limited(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.SUM if op is None else op
        return Pending(self.group.allreduce([tensor], options), what, self)

    def _limited(self, options: Any) -> Any:
        """A collective that ends in time by itself: gloo's threads work on what nobody waits for
        any more, and the process would not end before they do, by default for 30 minutes."""
        options.timeout, options.asyncOp = timedelta(seconds=self.timeout), True
        return options


@dataclass(frozen=True)
class Pending:
    """A collective under way."""

    work: Any
    what: str
    ranks: Ranks

    def wait(self) -> None:
        try:
            self.work.wait(timedelta(seconds=self.ranks.timeout))
        except RuntimeError as error:
            raise Gone(
                f"rank {self.ranks.rank} of {self.ranks.size} waited in {self.what} for ranks that "
                f"did not come within {self.ranks.timeout:g} s, or have ended: look at what the "
                f"others printed last ({str(error).splitlines()[0]})"
            ) from error


def fingerprint(value: Any) -> int:
    """A number of 63 bits, the same for equal values (plain JSON) and hardly ever for others."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def differing(one: str, other: str, around: int = 40) -> str:
    """'…a… against …b…': where two texts begin to differ."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    at = min(len(one), len(other)) if at is None else at
    start = max(0, at - around)
    lead = "…" if start else ""
    cut = [text[start : at + around] for text in (one, other)]
    return f"{lead}{cut[0]} against {lead}{cut[1]}"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
