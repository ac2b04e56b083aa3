"""Gradients averaged over ranks in buckets; each rank keeps the rows that it steps (ZeRO 2).

A bucket is reduce-scattered during the backward pass, as soon as all of its gradients are there.
(Rajbhandari et al., 1910.02054)
"""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from isokron.distributed.dtensor import Place, padded_part, part_of
from isokron.distributed.process_group import Pending, Ranks, control_group
from isokron.distributed.sharded_gradient import ShardedGradient

BUCKET_BYTES = 25 << 20
MAX_IN_FLIGHT = 3  # buckets that `average_` sends before it waits for the first of them


@dataclass(eq=False)
class GradientBucket:
    """Parameters of one dtype and device whose gradients travel together, as [R, section].

    Section r has the rows of each parameter that rank r steps, padded to the length of rank 0's.
    """

    params: list[Tensor] = field(default_factory=list)
    section: int = 0  # elements
    missing: set[Tensor] = field(default_factory=set)  # not reached by this backward pass so far
    average: Tensor | None = None  # [section], summed over backward passes


@dataclass(frozen=True)
class Transfer:
    """A bucket that has been sent."""

    bucket: GradientBucket
    buffer: Tensor  # [R, section]; must not be freed before the transfer is over
    received: Tensor  # [R, section], the sections of all ranks, or [1, section], their sum
    pending: Pending


class GradientBuckets:
    """Average gradients over ranks while the backward pass computes them.

    All ranks send buckets in one order. A ShardedGradient is in `.grad` of what has been sent, and
    the averages of several backward passes add up until `clear`, or until it is taken from there.

    Args:
        ranks: the processes, each of which has all parameters.
        dtype: in which gradients are added; None: the dtype of their parameters.
        bucket_bytes: size at which a bucket is full. It holds at least one parameter.
    """

    def __init__(
        self, ranks: Ranks, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be a whole number above 0, got {bucket_bytes!r}")
        self.ranks, self.dtype, self.bucket_bytes = ranks, dtype, bucket_bytes
        # a group of its own, so that agreement does not queue behind a bucket that never comes
        self._control = control_group(tuple(sorted(ranks.members)), ranks.timeout)
        self._buckets: list[GradientBucket] = []
        self._names: dict[Tensor, str] = {}
        # the bucket of each parameter, and its offset in a section
        self._slots: dict[Tensor, tuple[GradientBucket, int]] = {}
        self._reached: set[Tensor] = set()  # parameters that have an average
        self._turns: deque[GradientBucket] = deque()  # buckets in the order in which they are sent
        self._in_flight: deque[Transfer] = deque()
        self._sent = self._dropped = 0
        self._hooked: set[Tensor] = set()
        weakref.finalize(self, _release, self._slots)

    def add(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        """Put parameters into new buckets, the last first, as backward passes reach them."""
        named = [(name, p) for name, p in zip(names, params, strict=True) if p.numel()]
        layout = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in named]
        self._control.agree(
            "the layout of sharded gradients",
            {"bytes": self.bucket_bytes, "dtype": str(self.dtype), "parameters": layout},
        )
        buckets: dict[Any, GradientBucket] = {}
        filled: dict[Any, int] = {}
        for name, param in reversed(named):
            # frozen parameters apart: they would keep a bucket from leaving in the backward pass
            kind = (param.dtype, param.device, param.requires_grad)
            size = filled.get(kind, 0)
            filled[kind] = size + param.numel() * param.element_size()
            bucket = buckets.setdefault((kind, size // self.bucket_bytes), GradientBucket())
            bucket.params.append(param)
            self._names[param], self._slots[param] = name, (bucket, bucket.section)
            bucket.section += _slot_length(param, self.ranks)
        self._buckets += buckets.values()
        self._start_round()

    def _start_round(self) -> None:
        """Expect a backward pass; parameters that have become trainable take part in it."""
        # hooks hold this object weakly: once it is gone, they leave gradients alone
        hook = partial(_accumulated, weakref.ref(self))
        for param in self._slots:
            if param.requires_grad and param not in self._hooked:
                param.register_post_accumulate_grad_hook(hook)
                self._hooked.add(param)
        self._turns.clear()
        for bucket in self._buckets:
            bucket.missing = set(bucket.params)
            if all(param.requires_grad for param in bucket.params):
                self._turns.append(bucket)

    def gradient_ready(self, param: Tensor) -> None:
        """A backward pass has added to `param.grad`: send the buckets that are complete."""
        if self._local(param) is None:
            raise RuntimeError(
                f"the gradient of parameter {self._names[param]} was taken by another optimizer "
                "that shards gradients; delete that optimizer first"
            )
        if param in self._reached and not self._stands_in(param):
            self._drop()
        self._slots[param][0].missing.discard(param)
        while self._turns and not self._turns[0].missing:
            self._send(self._turns[0])
            self._turns.rotate(-1)
        while self._in_flight and self._in_flight[0].pending.work.is_completed():
            self._receive()

    def _stands_in(self, param: Tensor) -> bool:
        """Whether the gradient is one that has been sent by this object."""
        grad = param.grad
        return isinstance(grad, ShardedGradient) and grad.buckets() is self

    def _local(self, param: Tensor) -> Tensor | None:
        """This rank's gradient that has not been sent."""
        grad = param.grad
        return grad.local if isinstance(grad, ShardedGradient) else grad

    def _drop(self) -> None:
        """Forget averages whose gradients were set to None or replaced, as by model.zero_grad()."""
        for param in [param for param in self._reached if not self._stands_in(param)]:
            self.zero_(param)
            self._reached.discard(param)
            self._dropped += 1

    def zero_(self, param: Tensor) -> None:
        """Let the average be 0."""
        while self._in_flight:
            self._receive()
        bucket, offset = self._slots[param]
        if bucket.average is not None:
            bucket.average[offset : offset + _slot_length(param, self.ranks)] = 0

    def _send(self, bucket: GradientBucket) -> None:
        """Begin to reduce-scatter a bucket, and drop its gradients."""
        size, first = self.ranks.size, bucket.params[0]
        buffer = first.new_empty(size, bucket.section, dtype=self.dtype or first.dtype)
        present = [param for param in bucket.params if self._local(param) is not None]
        if sum(param.numel() for param in present) < buffer.numel():
            buffer.zero_()
        slots, values = [], []
        for param in present:
            grad, offset = self._flat(param), self._slots[param][1]
            length = _slot_length(param, self.ranks)
            if param.ndim == 0:  # every rank steps a scalar
                grad = grad.expand(size)
            full = grad.numel() // length  # ranks that fill their slots
            slots.append(buffer[:full, offset : offset + length])
            values.append(grad[: full * length].view(full, length))
            if tail := grad.numel() - full * length:
                slots.append(buffer[full, offset : offset + tail])
                values.append(grad[full * length :])
            self._reached.add(param)
            param.grad = ShardedGradient(param, self)
        torch._foreach_copy_(slots, values)
        if added_by_receiver(buffer.device):
            received, lengths = torch.empty_like(buffer), [bucket.section] * size
            ends = (received.view(-1), buffer.view(-1))
            pending = self.ranks.all_to_all_into(*ends, lengths, lengths)
        else:
            received = buffer.new_empty(1, bucket.section)
            ends = (received.view(-1), buffer.view(-1))
            pending = self.ranks.reduce_scatter_into(*ends, dist.ReduceOp.SUM)
        self._in_flight.append(Transfer(bucket, buffer, received, pending))
        bucket.missing = set(bucket.params)
        self._sent += 1

    def _flat(self, param: Tensor) -> Tensor:
        grad = self._local(param)
        if grad is None or grad.layout is not torch.strided or grad.is_complex():
            raise RuntimeError(
                f"the gradient of parameter {self._names[param]} is sparse or complex and cannot "
                "be averaged over ranks; make the layer with sparse=False, and take the gradient "
                "of a real loss of real parameters"
            )
        return grad.detach().reshape(-1)

    def _receive(self) -> None:
        """Wait for the oldest transfer: average ← average + (g₀ + g₁ + …)/R, in rank order."""
        transfer = self._in_flight.popleft()
        transfer.pending.wait()
        total, *sections = transfer.received
        for section in sections:
            total.add_(section)
        average, bucket = total / self.ranks.size, transfer.bucket
        bucket.average = average if bucket.average is None else bucket.average.add_(average)

    def average_(self) -> None:
        """Send what no backward pass has completed, and wait until all averages are there.

        Raises on all ranks, before it waits for gradients, if they differ in what they have sent.
        """
        self._drop()
        unsent = [name for p, name in self._names.items() if self._local(p) is not None]
        passes = {"buckets sent": self._sent, "gradients set to None": self._dropped}
        self._control.agree("gradients before a step", {**passes, "gradients not sent": unsent})
        for bucket in self._buckets:
            if any(self._local(param) is not None for param in bucket.params):
                self._send(bucket)
            while len(self._in_flight) > MAX_IN_FLIGHT:
                self._receive()
        while self._in_flight:
            self._receive()
        self._start_round()

    def rows(self, param: Tensor) -> Tensor | None:
        """This rank's rows of the average gradient; None if no backward pass reached `param`."""
        bucket, offset = self._slots.get(param, (GradientBucket(), 0))
        if bucket.average is None or param not in self._reached:
            return None
        part = part_of(param.detach(), Place(self.ranks))
        return bucket.average[offset : offset + part.numel()].view(part.shape)

    def clip_norm_(self, max_norm: float) -> Tensor:
        """g ← g·min(1, max_norm/(‖g‖ + 10⁻⁶)), g the averages of all ranks; returns ‖g‖."""
        self.average_()
        squares = torch.zeros((), dtype=torch.float64, device="cpu")
        for param in self._slots:
            rows = self.rows(param)
            if rows is not None and (param.ndim or self.ranks.rank == 0):  # all ranks have scalars
                squares += torch.linalg.vector_norm(rows, dtype=torch.float64).square().cpu()
        norm = self._control.all_reduce_(squares.to(self._control.device)).sqrt().cpu()
        scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for bucket in self._buckets:
            if bucket.average is not None:
                bucket.average.mul_(scale)
        return norm

    def clear(self) -> None:
        """Forget the averages."""
        while self._in_flight:
            self._receive()
        for bucket in self._buckets:
            bucket.average = None
        for param in filter(self._stands_in, self._slots):
            param.grad = None
        self._reached.clear()
        self._start_round()


def added_by_receiver(device: torch.device) -> bool:
    """Whether sections are exchanged as they are: gloo's reduce_scatter is an all_reduce, which
    sends twice the bytes and cannot be polled."""
    return device.type == "cpu"


def _release(params: Iterable[Tensor]) -> None:
    """Take away the gradients of buckets that are gone."""
    for param in params:
        if isinstance(param.grad, ShardedGradient) and param.grad.buckets() is None:
            param.grad = None


def _slot_length(param: Tensor, ranks: Ranks) -> int:
    return padded_part(param.shape, ranks.size) if param.ndim else 1


@torch.no_grad()
def _accumulated(buckets: "weakref.ref[GradientBuckets]", param: Tensor) -> None:
    """The hook that autograd calls when it has added to a gradient."""
    if (alive := buckets()) is not None:
        alive.gradient_ready(param)
