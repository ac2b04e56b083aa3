"""When gradients become averages: all at the step (ZeRO-1), or while they appear (ZeRO-2).

Either way `sections` holds what this rank owns of the averages, by number of the bucket.
(Rajbhandari et al., 1910.02054)
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isokron.distributed.buckets import Bucket
from isokron.distributed.exchange import Reducing, begin_reduce
from isokron.distributed.ranks import Ranks

AHEAD = 2  # buckets under way besides the one that is waited for; each has a buffer of its own


class AtStep:
    """Whole gradients stay with their parameters; the step averages them, bucket by bucket.

    `params` and `buckets` may grow; `watch` is called when they have.
    """

    def __init__(
        self,
        ranks: Ranks,
        params: Sequence[Tensor],
        buckets: Sequence[Bucket],
        dtype: torch.dtype | None,
    ) -> None:
        self.ranks, self.params, self.buckets, self.dtype = ranks, params, buckets, dtype
        self.sections: dict[int, Tensor] = {}
        self._held: list[tuple[int, int]] | None = None

    def watch(self, first: int) -> None:
        """Parameters from this number on are new."""

    def present(self) -> set[int]:
        """The numbers of the parameters that have gradients."""
        return {i for i, param in enumerate(self.params) if param.grad is not None}

    def facts(self) -> dict[str, Any]:
        """What ranks must agree on besides."""
        return {"clipped": self._held is not None, "changed since": self._changed()}

    def _changed(self) -> bool:
        """Whether gradients are others than those that `hold` has averaged."""
        return self._held is not None and self._held != _marks(_gradients(self.params))

    def averaged(self) -> Iterator[Bucket]:
        """Buckets whose section is there, one by one, while the next are under way."""
        grads = _gradients(self.params)
        chosen = [b for b in self.buckets if not grads.keys().isdisjoint(b.parameters)]
        if self._held is not None:
            if self._changed():
                raise RuntimeError(
                    "gradients have changed since clip_grad_norm_ averaged and clipped them; call "
                    "it after the last backward pass, and step next"
                )
            yield from chosen
            return
        flying: deque[Reducing] = deque()
        for bucket in chosen:
            like = _like(self.params[bucket.parameters[0]], self.dtype)
            flying.append(begin_reduce(self.ranks, bucket, grads, like))
            if len(flying) > AHEAD:
                yield self._land(flying.popleft())
        while flying:
            yield self._land(flying.popleft())

    def _land(self, reducing: Reducing) -> Bucket:
        self.sections[reducing.bucket.number] = reducing.average()
        return reducing.bucket

    def hold(self) -> list[Bucket]:
        """Average now what the next step is to use."""
        buckets = list(self.averaged())
        self._held = _marks(_gradients(self.params))
        return buckets

    def release(self) -> None:
        """The step is over: gradients are with their parameters."""
        self.sections.clear()
        self._held = None

    def clear(self, set_to_none: bool) -> None:
        self.release()


class InBackward:
    """A unit's gradients are averaged, and dropped, as soon as all of them have appeared.

    Units go in turn, so that all ranks send them in one order. Averages of several backward passes
    add up in `sections` until `clear`.
    """

    def __init__(
        self,
        ranks: Ranks,
        params: Sequence[Tensor],
        buckets: Sequence[Bucket],
        dtype: torch.dtype | None,
    ) -> None:
        self.ranks, self.params, self.buckets, self.dtype = ranks, params, buckets, dtype
        self.sections: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        self._flying: deque[Reducing] = deque()
        self._sent = 0
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()  # parameters whose gradients are noticed
        weakref.finalize(self, _remove, self._hooks)

    def watch(self, first: int) -> None:
        """Parameters from this number on are new."""
        self._units: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            self._units.setdefault(bucket.unit, []).append(bucket)
        self._members = {unit: several[0].parameters for unit, several in self._units.items()}
        self._unit_of = {i: unit for unit, members in self._members.items() for i in members}
        self._start_round()

    def _start_round(self) -> None:
        itself = weakref.ref(self)
        for i, param in enumerate(self.params):
            if param.requires_grad and i not in self._hooked:  # it is new, or has thawed
                hook = partial(_appeared, itself, i)
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))
                self._hooked.add(i)
        live = [u for u, i in self._members.items() if all(self.params[j].requires_grad for j in i)]
        self._turns, self._next = live, 0
        self._missing = {unit: set(members) for unit, members in self._members.items()}

    def appeared(self, i: int) -> None:
        """The gradient of parameter i is there: send what is complete, in turn."""
        if i not in self._unit_of:  # it has no elements
            return
        self._missing[self._unit_of[i]].discard(i)
        while self._turns and not self._missing[self._turns[self._next]]:
            self._send(self._turns[self._next])
            self._next = (self._next + 1) % len(self._turns)
        while self._flying and self._flying[0].done():
            self._land(self._flying.popleft())

    def _send(self, unit: int) -> None:
        members = self._members[unit]
        grads = {i: grad for i in members if (grad := self.params[i].grad) is not None}
        for bucket in self._units[unit]:
            like = _like(self.params[members[0]], self.dtype)
            self._flying.append(begin_reduce(self.ranks, bucket, grads, like))
        for i in grads:
            self.params[i].grad = None
        self._seen |= grads.keys()
        self._missing[unit] = set(members)
        self._sent += 1

    def _land(self, reducing: Reducing) -> None:
        number, average = reducing.bucket.number, reducing.average()
        if number in self.sections:
            self.sections[number].add_(average)
        else:
            self.sections[number] = average

    def present(self) -> set[int]:
        """The numbers of the parameters that have gradients."""
        return self._seen | _gradients(self.params).keys()

    def facts(self) -> dict[str, Any]:
        """What ranks must agree on besides."""
        waiting = sorted(_gradients(self.params))
        return {"units of gradients sent": self._sent, "gradients not sent": waiting}

    def averaged(self) -> Iterator[Bucket]:
        """Buckets whose section is there; what has waited for gradients that did not come too."""
        turns = self._turns[self._next :] + self._turns[: self._next]
        rest = [unit for unit in self._units if unit not in set(turns)]
        for unit in turns + rest:
            if any(self.params[i].grad is not None for i in self._members[unit]):
                self._send(unit)
        self._start_round()
        while self._flying:
            self._land(self._flying.popleft())
        yield from (bucket for bucket in self.buckets if bucket.number in self.sections)

    def hold(self) -> list[Bucket]:
        """Average now what the next step is to use."""
        return list(self.averaged())

    def release(self) -> None:
        """The step is over: as ever, gradients stay until they are cleared."""

    def clear(self, set_to_none: bool) -> None:
        while self._flying:
            self._land(self._flying.popleft())
        self._start_round()
        if set_to_none:
            self.sections.clear()
            self._seen.clear()
        for section in self.sections.values():
            section.zero_()


@torch.no_grad()
def _appeared(reducer: "weakref.ref[InBackward]", i: int, param: Tensor) -> None:
    found = reducer()
    if found is not None:
        found.appeared(i)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _gradients(params: Sequence[Tensor]) -> dict[int, Tensor]:
    return {i: grad for i, param in enumerate(params) if (grad := param.grad) is not None}


def _marks(grads: dict[int, Tensor]) -> list[tuple[int, int]]:
    """What changes when a gradient is another one or is written to."""
    return [(id(grad), grad._version) for grad in grads.values()]


def _like(param: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(0, dtype=dtype or param.dtype, device=param.device)
