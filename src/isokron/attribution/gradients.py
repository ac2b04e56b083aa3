"""A run's gradient store: built shard by shard, by one process or by several, and scored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isokron.attribution.data import Data, Subject, spread, to_device
from isokron.attribution.evaluate import Noise, noise
from isokron.attribution.exact import ExactScorer, Scored, positions
from isokron.attribution.projection import (
    Encoding,
    Projection,
    choose_dim,
    collect,
    encoding,
)
from isokron.attribution.queries import Query
from isokron.attribution.score import query_gradients
from isokron.attribution.store import Span, Store, StoreWriter
from isokron.curvature import Curvature
from isokron.distributed import Ranks
from isokron.distributed.team import in_turn, share, side_by_side, together
from isokron.tasks import Shown

SHARDS = 16  # at least, where there are as many examples, so that processes can share them
SHARD = 128 * 2**20  # bytes of gradients in a shard, unless memory is less
SAMPLE = 64  # training examples on which projected scores are compared with exact ones
ASKED = 8  # queries for which a dimension is chosen
SPEARMAN = 0.9  # rank correlation with exact scores that the default dimension must reach
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class StoreScorer:
    """Rows of a store as its settings say: dim, whiten, damping, dtype, kind and seed.

    `subject`: with the layers that are projected; `curvature`: None for H = I.
    """

    subject: Subject
    curvature: Curvature | None
    exact: ExactScorer

    def encoding(self, settings: Mapping[str, Any]) -> Encoding:
        projection = None
        if settings["dim"]:
            projection = Projection(settings["dim"], settings["kind"], settings["seed"])
        return encoding(
            self.subject.layers,
            projection,
            whiten=self.curvature if settings["whiten"] else None,
            damping=settings["damping"],
            device=self.subject.device,
        )

    def query_rows(
        self, rows_of: Encoding, queries: Sequence[Query], settings: Mapping[str, Any]
    ) -> Tensor:
        """Queries as rows: like those of the store, or H⁻¹∇ projected where it is not whitened."""
        subject, rows = self.subject, list[Tensor]()
        batches = [to_device(query.batch, subject.device) for query in queries]
        if settings["whiten"] or self.curvature is None:
            collect(
                subject.model,
                batches,
                subject.loss,
                rows_of,
                lambda part, _: rows.append(part.sum(0, keepdim=True)),
            )
        else:
            inverse = self.exact.inverse(settings["damping"])
            for batch in batches:
                one = query_gradients(subject, [batch], inverse, dense=True)
                matrices = {name: part.matrices for name, part in one.layers.items()}
                rows.append(rows_of.matrices(matrices))
        return torch.cat(rows).float().cpu()

    def scores(
        self,
        store: Store,
        settings: Mapping[str, Any],
        queries: Sequence[Query],
        *,
        memory: int,
        mean: bool = False,
        by_layer: bool = False,
        unit: bool = False,
    ) -> Scored:
        """Products of the queries' rows with all rows of the store, block by block."""
        rows = self.query_rows(self.encoding(settings), queries, settings)
        if unit and not (settings["whiten"] or self.curvature is None):
            raise ValueError(
                "unit scores of a store need whitened rows, whose lengths are those of H^(-1/2)∇; "
                "fit kfac, tkfac or shampoo and build again, or score exactly (--no-store)"
            )
        rows = rows.mean(0, keepdim=True) if mean else rows
        names = [layer.name for layer in self.subject.layers]
        columns = [store.columns(name) for name in names]
        ranks = self.subject.ranks
        parts, squares = [torch.zeros(len(rows), len(columns), 0)], [torch.zeros(0)]
        with together(ranks, "scoring shards"):
            for _, block in store.blocks(memory, share(ranks, len(store.shards))):
                stored = block.float()
                parts.append(torch.stack([rows[:, c] @ stored[:, c].mT for c in columns], 1))
                squares.append(stored.double().square().sum(1).float())
        total = side_by_side(ranks, torch.cat(parts, 2))
        # added up in float64: rows of whole gradients have millions of columns
        scores = total.double().sum(1).float()
        lengths = None
        if unit:
            roots = side_by_side(ranks, torch.cat(squares)).sqrt()
            lengths = (rows.norm(dim=1)[:, None] * roots).clamp_min(1e-30)
        return Scored(scores, total if by_layer else None, lengths, store.extra("loss"))

    def self_influence(self, store: Store, memory: int) -> Tensor:
        """Squared lengths of whitened rows: [N]"""
        ranks, parts = self.subject.ranks, [torch.zeros(0)]
        with together(ranks, "scoring shards"):
            for _, block in store.blocks(memory, share(ranks, len(store.shards))):
                parts.append(block.float().square().sum(1))
        return side_by_side(ranks, torch.cat(parts))

    def sample(self) -> list[int]:
        """Examples on which projected scores are compared with exact ones."""
        return spread(len(self.subject.data), min(SAMPLE, len(self.subject.data)))

    def noise(
        self, queries: Sequence[Query], scores: Tensor, damping: float, block: int, mean: bool
    ) -> Noise:
        """Projected scores of all examples against exact ones of a sample."""
        right = self.exact.scores(
            queries, damping, block=block, mean=mean, numbers=self.sample()
        ).scores
        return noise(right, scores[:, self.sample()])

    def chosen_dim(
        self, settings: Mapping[str, Any], queries: Sequence[Query], memory: int
    ) -> int | None:
        """The smallest dimension whose scores agree with exact ones on a sample; None if no store
        within the memory does."""
        subject, sample = self.subject, self.sample()
        if not queries:
            data = subject.data
            numbers = spread(len(data), min(ASKED, len(data)))
            queries = [Query(data.batch([n]), (Shown(title=data.ids[n]),), "") for n in numbers]
        queries = queries[:ASKED]
        right = self.exact.scores(
            queries, settings["damping"], block=len(queries), numbers=sample
        ).scores

        def measure(dim: int) -> float:
            wanted = {**settings, "dim": dim}
            return noise(right, self.computed_scores(wanted, queries, sample)).spearman

        return choose_dim(subject.layers, len(subject.data), memory, measure, SPEARMAN)[0]

    def computed_scores(
        self, settings: Mapping[str, Any], queries: Sequence[Query], numbers: Sequence[int]
    ) -> Tensor:
        """Scores [Q, n] of some examples, whose rows are not stored."""
        subject, rows_of, rows = self.subject, self.encoding(settings), list[Tensor]()
        plan = subject.data.plan(numbers)
        batches = subject.batches(plan)
        collect(subject.model, batches, subject.loss, rows_of, lambda part, _: rows.append(part))
        stored = torch.cat(rows).float().cpu()[positions(plan, numbers)]
        return self.query_rows(rows_of, queries, settings) @ stored.mT

    def build(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        recorded: Mapping[str, Any],
        memory: int,
    ) -> Store:
        """One row of every example in `folder`; finished shards of an earlier call stay.

        `recorded`: all that decides the numbers; a folder that has others is refused. Ranks share
        the shards: one begins the store and finishes it.
        """
        subject, ranks = self.subject, self.subject.ranks
        rows_of, dtype = self.encoding(settings), DTYPES[settings["dtype"]]
        per_shard = shard_size(rows_of.width * dtype.itemsize, len(subject.data), memory)
        if ranks is not None:
            ranks.agree("examples in a shard", per_shard)
        with in_turn(ranks, "opening the store"):
            writer = StoreWriter.open(
                folder,
                settings=recorded,
                columns=rows_of.columns(),
                examples=len(subject.data),
                examples_per_shard=per_shard,
                dtype=dtype,
            )
        missing = _missing(writer, ranks)
        own = missing if ranks is None else missing[ranks.rank :: ranks.size]
        total, done = sum(span.last - span.first for span in own), 0
        subject.progress("build", 0, total)
        with together(ranks, "building shards"):
            for span in own:
                rows, losses = self._shard(rows_of, span)
                ids = subject.data.ids[span.first : span.last]
                writer.write(span.number, rows, ids=ids, extra={"loss": losses})
                done += span.last - span.first
                subject.progress("build", done, total)
        with in_turn(ranks, "finishing the store"):
            return writer.finish() if ranks is None or ranks.rank == 0 else Store.open(folder)

    def _shard(self, rows_of: Encoding, span: Span) -> tuple[Tensor, Tensor]:
        """Rows [n, D] and losses [n] of a shard's examples, on the CPU, in their order."""
        subject = self.subject
        plan = subject.data.plan(range(span.first, span.last))
        rows: list[Tensor] = []
        losses: list[Tensor] = []

        def take(part: Tensor, of_examples: Tensor) -> None:
            _check_finite(part, of_examples, subject.data, plan[len(rows)])
            rows.append(part.cpu())
            losses.append(of_examples.cpu())

        collect(subject.model, subject.batches(plan), subject.loss, rows_of, take)
        order = torch.tensor([number for batch in plan for number in batch]).argsort()
        return torch.cat(rows)[order], torch.cat(losses)[order]


def _check_finite(rows: Tensor, losses: Tensor, data: Data, numbers: list[int]) -> None:
    finite = rows.isfinite().all(1) & losses.isfinite()
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0, 0])
        raise FloatingPointError(
            f"example {data.ids[numbers[bad]]!r} has a loss of {float(losses[bad]):g} and a "
            "gradient that is not finite; look at its data, or leave it out"
        )


def shard_size(row: int, examples: int, memory: int) -> int:
    """Examples of a shard: an eighth of the memory at most, and enough shards to be shared."""
    limit = min(SHARD, memory // 8)
    if row > limit:
        raise ValueError(
            f"memory must be eight times a row of {row} bytes, got {memory}; give more --memory, "
            "or a smaller --dim"
        )
    return max(1, min(examples, limit // row, -(-examples // SHARDS)))


def _missing(writer: StoreWriter, ranks: Ranks | None) -> list[Span]:
    """The shards to write; ranks check some each of those that are there."""
    if ranks is None:
        return writer.missing()
    with together(ranks, "looking for shards"):
        own = writer.missing(range(ranks.rank, writer.schema.shards, ranks.size))
    texts = ranks.gather_text(json.dumps([span.number for span in own]))
    numbers = sorted(number for text in texts for number in json.loads(text))
    return [writer.schema.span(number) for number in numbers]
