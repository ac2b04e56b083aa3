"""A fit's batches cut into segments, whose sums are added in an order that is always the same.

Sums of floats depend on their order. Sixteen segments make the leaves of a tree in which every node
is the sum of its four children from left to right: whoever has summed a segment, and on however
many processes, the bits are the same. One process holds two sums more than the one it is at.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

SEGMENTS = 16
CHILDREN = 4

T = TypeVar("T")
Named = Mapping[str, Tensor]


class Workers(Protocol):
    """The processes that share a fit: see isokron.distributed.team.Team."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def together(self, what: str) -> AbstractContextManager[None]: ...

    def exchange(self, outgoing: Sequence[Named]) -> list[dict[str, Tensor]]: ...

    def gather(self, own: Named) -> list[dict[str, Tensor]]: ...

    def texts(self, text: str) -> list[str]: ...


@dataclass(frozen=True)
class Division:
    """Into how many segments batches are cut, and which of them are this process's."""

    workers: Workers | None = None
    segments: int = SEGMENTS

    @property
    def rank(self) -> int:
        return 0 if self.workers is None else self.workers.rank

    @property
    def size(self) -> int:
        return 1 if self.workers is None else self.workers.size

    def own(self, rank: int | None = None) -> range:
        """Numbers of the segments of a process."""
        rank = self.rank if rank is None else rank
        return range(rank * self.segments // self.size, (rank + 1) * self.segments // self.size)

    def end(self, segment: int, batches: int) -> int:
        """How many batches the segments up to this one have."""
        return (segment + 1) * batches // self.segments

    def part(self, batches: Any) -> tuple[int, Iterable[Any]]:
        """The number of the first of this process's batches, and the batches."""
        if self.size == 1:
            return 0, batches
        own, count = self.own(), len(batches)
        if not own:
            return 0, ()
        first, last = self.end(own[0] - 1, count), self.end(own[-1], count)
        return first, batches[first:last]

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.workers is None else self.workers.together(what)

    def held(self, rank: int) -> list[tuple[int, int]]:
        """What a process holds when its segments are summed: first segment and last, excluded."""
        tree: Tree[None] = Tree(lambda one, other: None)
        for segment in self.own(rank):
            tree.put(segment, segment + 1, None)
        return [(first, last) for first, last, _ in tree.parts]


class Tree(Generic[T]):
    """Sums of neighbouring segments, `add`ed as soon as the tree allows."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self.add = add
        self.parts: list[tuple[int, int, T]] = []

    def put(self, first: int, last: int, sums: T) -> None:
        """The sums of segments from first to last, excluded, which come next."""
        self.parts.append((first, last, sums))
        while len(self.parts) > 1 and joins(self.parts[-2][0], *self.parts[-1][:2]):
            start, _, one = self.parts[-2]
            _, stop, other = self.parts[-1]
            del self.parts[-2:]
            self.parts.append((start, stop, self.add(one, other)))


def joins(before: int, first: int, last: int) -> bool:
    """Whether [first, last) is a node, and what comes `before` it begins where its parent does."""
    size = 1
    while size < last - first:
        size *= CHILDREN
    if size != last - first or first % size:
        return False
    return before == first - first % (size * CHILDREN)


class Segments(Generic[T]):
    """Sums of a process's own segments while its batches come by; `now`: of the one it is at.

    `batches`: how many there are of all processes; 0 where that is not known, of one segment.
    """

    def __init__(
        self, division: Division, batches: int, fresh: Callable[[], T], add: Callable[[T, T], T]
    ) -> None:
        self.division, self.batches, self.fresh = division, batches, fresh
        self.tree = Tree(add)
        self.left = list(division.own())
        self.done = division.end(self.left[0] - 1, batches) if self.left else 0
        self.now = fresh()
        self.advance(0)  # segments may have no batch

    def advance(self, batches: int = 1) -> None:
        """So many more have come."""
        self.done += batches
        while self.left and self.batches and self.done >= self._end():
            self._close()

    def finish(self) -> Tree[T]:
        """No more will come."""
        last = self._last()
        if self.batches and self.done != last:
            raise ValueError(f"batches must be as many as their length, {last}, got {self.done}")
        while self.left:
            self._close()
        return self.tree

    def _last(self) -> int:
        own = self.division.own()
        return self.division.end(own[-1], self.batches) if own else 0

    def _end(self) -> int:
        return self.division.end(self.left[0], self.batches)

    def _close(self) -> None:
        segment = self.left.pop(0)
        sums, self.now = self.now, self.fresh()
        self.tree.put(segment, segment + 1, sums)


def owners(costs: Mapping[str, float], size: int) -> list[list[str]]:
    """The layers of every process: the costliest first, each to who has least."""
    loads, found = [0.0] * size, [list[str]() for _ in range(size)]
    for name in sorted(costs, key=lambda name: -costs[name]):
        rank = loads.index(min(loads))
        loads[rank] += costs[name]
        found[rank].append(name)
    return found


def rounds(each: Sequence[Sequence[str]]) -> Iterator[list[str | None]]:
    """One layer of every process at a time, None where it has no more."""
    for k in range(max(map(len, each))):
        yield [names[k] if k < len(names) else None for names in each]
