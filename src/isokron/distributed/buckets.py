"""Parameters cut into pieces that have owners, in flat buckets: who has what, and where.

Bookkeeping only: numbers in, numbers out.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

# Kernels take so many elements at a time and what is left at a tensor's end in another way: a piece
# that starts at a multiple, and ends at one or with its parameter, gets the bits of the whole.
UNIT = 32
# Elements of a piece: 2048 units. The cuts are the same for any number of ranks, and so is what
# checkpoints call them.
PIECE = 1 << 16


@dataclass(frozen=True)
class Piece:
    """Elements offset … offset+length of a flattened parameter, and where they travel."""

    parameter: int
    shape: tuple[int, ...]  # of the whole parameter
    number: int  # counted in the parameter
    offset: int
    length: int
    owner: int  # the rank that keeps its state and steps it
    bucket: int
    start: int  # in the owner's section of the bucket


@dataclass(frozen=True)
class Bucket:
    """Pieces of one kind that travel together: R sections of equal length, one a rank, flat.

    `unit`: buckets of one unit share a parameter too large for one of them. `section`: the longest
    of what ranks own here; the others' sections are padded.
    """

    number: int
    unit: int
    kind: Hashable
    section: int
    pieces: tuple[Piece, ...]

    @cached_property
    def parameters(self) -> list[int]:
        return list(dict.fromkeys(piece.parameter for piece in self.pieces))

    def owned(self, rank: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.owner == rank]


@dataclass(frozen=True)
class Sheet:
    """What the layout has to know of a parameter. `kind`: only equal ones share a bucket."""

    shape: tuple[int, ...]
    itemsize: int
    kind: Hashable = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def cuts(numel: int) -> list[tuple[int, int]]:
    """(offset, length) of the pieces of so many elements."""
    return [(offset, min(PIECE, numel - offset)) for offset in range(0, numel, PIECE)]


def lay_out(
    sheets: Sequence[Sheet],
    ranks: int,
    bucket_bytes: int,
    *,
    first: int = 0,
    before: Sequence[Bucket] = (),
) -> list[Bucket]:
    """The buckets of these parameters, last parameters first, as backward passes reach them.

    A bucket holds at most `bucket_bytes`, padding aside, or one piece. `first`: the number of the
    first parameter. `before`: buckets there are already, which these follow.
    """
    loads = [0] * ranks
    for bucket in before:
        for piece in bucket.pieces:
            loads[piece.owner] += piece.length
    buckets: list[Bucket] = []
    unit = before[-1].unit + 1 if before else 0
    for parts in _units(sheets, bucket_bytes):
        for part in parts:
            number = len(before) + len(buckets)
            kind = sheets[part[0][0]].kind
            buckets.append(_owned(part, sheets, number, unit, kind, first, loads))
        unit += 1
    return buckets


Cut = tuple[int, int, int, int]  # parameter, number, offset, length


def _units(sheets: Sequence[Sheet], most: int) -> Iterator[list[list[Cut]]]:
    """Buckets that are full together: one of whole parameters, or several of one large one."""
    open_: dict[Hashable, tuple[list[Cut], int]] = {}
    for i in reversed(range(len(sheets))):
        sheet = sheets[i]
        pieces = [(i, k, *cut) for k, cut in enumerate(cuts(sheet.numel))]
        size = sheet.numel * sheet.itemsize
        if not pieces:
            continue
        if size > most:
            each = max(1, most // (PIECE * sheet.itemsize))
            yield [pieces[k : k + each] for k in range(0, len(pieces), each)]
            continue
        gathered, filled = open_.get(sheet.kind, ([], 0))
        if filled + size > most:
            yield [gathered]
            gathered, filled = [], 0
        open_[sheet.kind] = ([*gathered, *pieces], filled + size)
    yield from ([gathered] for gathered, _ in open_.values())


def _owned(
    part: list[Cut],
    sheets: Sequence[Sheet],
    number: int,
    unit: int,
    kind: Hashable,
    first: int,
    loads: list[int],
) -> Bucket:
    """Each piece, the longest first, to the rank that has least here, then least in all."""
    fill = [0] * len(loads)
    pieces = []
    for i, k, offset, length in sorted(part, key=lambda cut: -cut[3]):
        owner = min(range(len(loads)), key=lambda rank: (fill[rank], loads[rank], rank))
        shape = sheets[i].shape
        pieces.append(Piece(first + i, shape, k, offset, length, owner, number, fill[owner]))
        fill[owner] += length
        loads[owner] += length
    return Bucket(number, unit, kind, max(fill), tuple(pieces))
