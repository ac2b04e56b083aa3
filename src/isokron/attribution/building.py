"""A store of the gradients of examples, built shard by shard."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from isokron.attribution.collect import collect
from isokron.attribution.encoding import Encoding
from isokron.attribution.storage.ragged import Display
from isokron.attribution.storage.store import Store
from isokron.attribution.storage.writer import Span, StoreWriter
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.distributed import Ranks
from isokron.distributed.team import in_turn, together

SHARDS = 16  # at least, where there are as many batches
SHARD = 128 * 2**20  # bytes of gradients in a shard, unless memory is less


class Indexed(Protocol):
    """Examples by number, as isokron.tasks.Examples are."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> Any: ...


def build_store(
    folder: str | Path,
    model: nn.Module,
    examples: Indexed,
    loss: Loss | Likelihood,
    encoding: Encoding,
    *,
    ids: Sequence[str] = (),
    show: Callable[[Any], list[Display]] | None = None,
    settings: Mapping[str, Any] | None = None,
    tokens: bool = False,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 16,
    per_shard: int | None = None,
    memory: int | None = None,
    progress: Callable[[int], None] = lambda examples: None,
    ranks: Ranks | None = None,
) -> Store:
    """The store of all examples' rows, in `folder`; what is there of it already stays.

    `settings`: whatever decides the numbers, refused where the folder has others. `per_shard`:
    examples in a shard, by default as many as make 128 MB, or an eighth of `memory` (bytes).
    `show`: what a person will see of examples; `progress`: told how many have been done; `ranks`:
    processes that share the shards, of which one begins the store and ends it.
    """
    per_shard = per_shard or shard_size(encoding, len(examples), batch_size, memory)
    given = {**(settings or {}), "batch_size": batch_size}
    columns = encoding.columns()
    if ranks is not None:
        ranks.agree("examples in a shard", per_shard)
    with in_turn(ranks, "opening the store"):
        writer = StoreWriter.open(
            folder,
            settings=given,
            columns=columns,
            examples=len(examples),
            examples_per_shard=per_shard,
            dtype=dtype,
            per_token=tokens,
        )
    names = ids or [str(number) for number in range(len(examples))]
    missing = missing_of(writer, ranks)
    own = missing if ranks is None else missing[ranks.rank :: ranks.size]
    count = Share(len(examples), missing, own, progress)
    with together(ranks, "building shards"):
        for span in own:
            shard = Shard(span, names, tokens, count)
            batches = _batches(examples, span, batch_size)
            collect(model, batches, loss, encoding, shard.take, tokens=tokens)
            numbers = list(range(span.first, span.last))
            shown = None if show is None else show(examples.batch(torch.tensor(numbers)))
            writer.write(
                span.number,
                torch.cat(shard.rows),
                ids=[names[i] for i in numbers],
                example=torch.cat(shard.example),
                position=torch.cat(shard.position) if tokens else None,
                display=shown,
                extra={"loss": torch.cat(shard.losses)},
            )
    with in_turn(ranks, "finishing the store"):
        return writer.finish() if ranks is None or ranks.rank == 0 else Store.open(folder)


def missing_of(writer: StoreWriter, ranks: Ranks | None) -> list[Span]:
    """The shards to be written, known to all ranks; each looks at some of those that are there."""
    if ranks is None:
        return writer.missing()
    with together(ranks, "looking for shards"):
        own = writer.missing(range(ranks.rank, writer.plan.shards, ranks.size))
    every = ranks.gather_text(json.dumps([span.number for span in own]))
    numbers = sorted(number for text in every for number in json.loads(text))
    return [Span(number, *writer.plan.span(number)) for number in numbers]


class Share:
    """Progress of one process's share of what is missing, as if all were as far."""

    def __init__(
        self, total: int, missing: list[Span], own: list[Span], progress: Callable[[int], None]
    ) -> None:
        self.missing, self.own = (sum(s.last - s.first for s in some) for some in (missing, own))
        self.there, self.done, self.progress = total - self.missing, 0, progress
        progress(self.there)

    def __call__(self, count: int) -> None:
        self.done += count
        self.progress(self.there + self.done * self.missing // self.own)


class Shard:
    """Rows of one shard as its batches come by."""

    def __init__(
        self, span: Span, ids: Sequence[str], tokens: bool, progress: Callable[[int], None]
    ) -> None:
        self.ids, self.tokens, self.next, self.progress = ids, tokens, span.first, progress
        self.rows: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.example: list[Tensor] = []
        self.position: list[Tensor] = []

    def take(self, rows: Tensor, losses: Tensor) -> None:
        count = len(rows)
        numbers = torch.arange(self.next, self.next + count)
        self.next += count
        finite = rows.isfinite().flatten(1).all(1) & losses.isfinite()
        if not bool(finite.all()):
            bad = int(numbers[~finite][0])
            raise FloatingPointError(
                f"example {self.ids[bad]!r} has a loss of {float(losses[~finite][0]):g} and a "
                "gradient that is not finite; look at its data, or leave it out"
            )
        if self.tokens:
            used = rows.ne(0).any(2)  # a padding has no gradient
            places = torch.arange(rows.size(1)).expand(len(rows), -1)
            self.position.append(places[used])
            losses = losses[:, None].expand_as(used)[used]
            numbers, rows = numbers[:, None].expand_as(used)[used], rows[used]
        self.rows.append(rows)
        self.losses.append(losses)
        self.example.append(numbers)
        self.progress(count)


def shard_size(
    encoding: Encoding, examples: int, batch_size: int = 1, memory: int | None = None
) -> int:
    """How many examples make a shard: whole batches, a few of them fit in memory at once, and there
    are enough of them to be shared by processes, however many there are."""
    row = 4 * encoding.width
    most = SHARD if memory is None else min(SHARD, memory // 8)
    if memory is not None and row > memory // 8:
        raise ValueError(
            f"memory must be eight times a row of {row} bytes, got {memory}; give more, or project "
            "gradients to fewer dimensions"
        )
    shared = -(-examples // SHARDS)
    return max(1, min(examples, most // row, -(-shared // batch_size) * batch_size))


def _batches(examples: Indexed, span: Span, size: int) -> Iterator[Any]:
    for first in range(span.first, span.last, size):
        yield examples.batch(torch.arange(first, min(first + size, span.last)))
