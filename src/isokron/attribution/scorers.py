"""Scores of all training examples, exact in passes over the data, or from a gradient store."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from isokron.attribution.data import Data, Subject, spread, to_device
from isokron.attribution.evaluate import Noise, noise
from isokron.attribution.memory import MemoryPlan
from isokron.attribution.projection import (
    Encoder,
    choose_dim,
    collect,
    encoders,
    entry_shares,
    largest_entries,
    width,
    with_entries,
)
from isokron.attribution.queries import Query
from isokron.attribution.score import (
    QueryBatches,
    QueryGradients,
    exact_scores,
    query_gradients,
)
from isokron.attribution.store import (
    DTYPES,
    SCHEMA,
    Schema,
    Span,
    Store,
    discard_other,
    read_entries,
    read_schema,
    write_entries,
)
from isokron.curvature import Curvature
from isokron.curvature.layers import Layer
from isokron.curvature.selection import Selection
from isokron.distributed import Ranks
from isokron.distributed.rank_tasks import in_turn, share, side_by_side, together
from isokron.files import locked
from isokron.report import render
from isokron.tasks import Shown

SHARDS = 16  # minimum number, so that processes can share them
SHARD = 128 * 2**20  # maximum bytes of gradients in a shard
SAMPLE = 64  # training examples on which projected scores are compared with exact ones
MEASURED = 128  # other training examples, on which the entries of a row are chosen
ASKED = 8  # queries used to choose a dimension
SPEARMAN = 0.9  # minimum rank correlation with exact scores for the default dimension
TINY = 1e-30
DAMPING = 0.1
MODES = ("individual", "mean", "nearest")


class Scored(NamedTuple):
    """scores [Q, N]; on request by_layer [Q, layers, N] and lengths |q||t| [Q, N]."""

    scores: Tensor
    by_layer: Tensor | None = None
    lengths: Tensor | None = None
    losses: Tensor | None = None  # [N]

    def comparable(self) -> Tensor:
        """Scores, or cosines if there are lengths: [Q, N]"""
        return self.scores if self.lengths is None else self.scores / self.lengths

    def combined(self, mode: str) -> "Scored":
        """Scores or cosines as `mode` asks for them: for "nearest", the largest over queries."""
        scores, layered = self.comparable(), self.by_layer
        if layered is not None and self.lengths is not None:
            layered = layered / self.lengths[:, None]
        if mode == "nearest":
            # scores by layer are taken from the query with the largest score, too
            best = scores.argmax(0, keepdim=True)
            scores = scores.gather(0, best)
            if layered is not None:
                layered = layered.gather(0, best[:, None].expand(-1, layered.size(1), -1))
        return Scored(scores, layered, None, self.losses)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of `Attributor.score` that no scorer takes."""
    mode, top, refine = (settings[name] for name in ("mode", "top", "refine"))
    name = settings["name"]
    # "/" alone has an empty name; files that begin with a dot are temporary
    if name is not None and (not name or Path(name).name != name or name.startswith(".")):
        raise ValueError(f"name must be a file name without a folder, got {name!r}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    if settings["verify"] and mode != "individual":
        raise ValueError(f"verify needs mode='individual', got {mode!r}; leave one of them out")
    if type(refine) is not int or refine < 0:
        raise ValueError(f"refine must be a whole number of at least 0, got {refine!r}")


def check_build(settings: Mapping[str, Any]) -> None:
    """Refuse settings of `Attributor.build` that no store has."""
    dim, dtype = settings["dim"], settings["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {dtype!r}")
    if dim is not None and (type(dim) is not int or dim < 1):
        raise ValueError(f"dim must be a whole number of at least 1, got {dim!r}")
    check_damping(settings["damping"])


def check_damping(damping: float) -> float:
    if not 0 <= damping < float("inf"):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
    return damping


@dataclass(frozen=True, eq=False)
class ExactScorer:
    """Exact scores of a subject. inverse: damping → H⁻¹, or None for the identity."""

    subject: Subject
    inverse: Callable[[float], Curvature | None]
    default_damping: ClassVar[float] = DAMPING

    def settled(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of `Attributor.score` with their damping; refuse those without meaning here."""
        damping = settings["damping"]
        damping = self.default_damping if damping is None else check_damping(damping)
        return {**settings, "damping": float(damping)}

    def answer(
        self, queries: Sequence[Query], settings: Mapping[str, Any], plan: MemoryPlan
    ) -> tuple[Scored, Noise | None]:
        """Scores of all examples by settled settings, and their noise if they are not exact."""
        plan.check()
        options = score_options(settings)
        scored = self.scores(queries, settings["damping"], block=plan.block, **options)
        return scored.combined(settings["mode"]), None

    def coverage(self, selection: Selection) -> dict[str, Any]:
        """The parameters that scores cover, of those selected."""
        names = {layer.name for layer in self.subject.layers}
        return selection.without(
            {x.name: "not in the store" for x in selection.layers if x.name not in names}
        ).record()

    def gradients(
        self, queries: Sequence[Query], damping: float, mean: bool = False
    ) -> QueryGradients:
        """H⁻¹∇ of every query; with `mean`, of their sum."""
        groups = [0] * len(queries) if mean else None
        names = [query.name for query in queries]
        batches = self._batches_of(queries)
        return query_gradients(self.subject, batches, self.inverse(damping), groups, names=names)

    def scores(
        self,
        queries: Sequence[Query],
        damping: float,
        *,
        block: int,
        mean: bool = False,
        by_layer: bool = False,
        unit: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> Scored:
        """Scores of all examples, or of `numbers`. block: queries per pass."""
        ranks, plan = self.subject.ranks, self.subject.data.plan(numbers)
        batches = self._share(plan, None if numbers else "score")
        parts, lengths = [], []
        # a mean takes the memory of one query
        step = len(queries) if mean else block
        for first in range(0, len(queries), step):
            asked = queries[first : first + step]
            gradients = self.gradients(asked, damping, mean)
            with together(ranks, "scoring examples"):
                scores, losses, squares, _ = exact_scores(
                    self.subject, batches, gradients, by_layer=by_layer, squares=unit
                )
            parts.append(scores / len(queries) if mean else scores)
            if unit:
                roots = side_by_side(ranks, squares).clamp_min(0).sqrt()
                lengths.append(self._norms(asked, gradients, mean)[:, None] * roots)
            # freed before the next block is computed
            del gradients
        order = positions(plan, numbers)
        scores = side_by_side(ranks, torch.cat(parts)).cpu()[..., order]
        losses = side_by_side(ranks, losses).cpu()[order]
        products = torch.cat(lengths).cpu()[:, order].clamp_min(TINY) if unit else None
        if by_layer:
            return Scored(scores.sum(1), scores, products, losses)
        return Scored(scores, None, products, losses)

    def self_influence(self, damping: float) -> Tensor:
        """⟨∇, H⁻¹∇⟩ of every training example: [N]"""
        ranks, plan = self.subject.ranks, self.subject.data.plan()
        with together(ranks, "scoring examples"):
            no_queries = self.gradients([], damping)
            batches = self._share(plan, "score")
            result = exact_scores(self.subject, batches, no_queries, squares=True)
        return side_by_side(ranks, result.squares).cpu()[positions(plan, None)]

    def example_tokens(
        self, numbers: Sequence[int], gradients: QueryGradients
    ) -> tuple[dict[int, list[float]], dict[int, float], dict[int, float]]:
        """By example, for the first query: scores of its positions, its score, and ⟨∇, H⁻¹∇⟩.

        Layers with fewer positions than others, as after pooling, count in the score only.
        """
        tokens: dict[int, list[float]] = {}
        totals: dict[int, float] = {}
        squares: dict[int, float] = {}
        for batch in self.subject.data.plan(numbers):
            examples = [self.subject.batch(batch)]
            result = exact_scores(self.subject, examples, gradients, tokens=True, squares=True)
            assert result.totals is not None
            tokens |= dict(zip(batch, result.scores[0].tolist(), strict=True))
            totals |= dict(zip(batch, result.totals[0].tolist(), strict=True))
            squares |= dict(zip(batch, result.squares.clamp_min(0).tolist(), strict=True))
        return tokens, totals, squares

    def query_tokens(self, query: Query, numbers: Sequence[int], damping: float) -> list[float]:
        """The influence of some examples on each position of a query."""
        batches = [self.subject.batch(batch) for batch in self.subject.data.plan(numbers)]
        groups = [0] * len(batches)
        examples = query_gradients(self.subject, batches, self.inverse(damping), groups)
        result = exact_scores(self.subject, self._batches_of([query]), examples, tokens=True)
        values: list[float] = result.scores[0].sum(0).tolist()
        return values

    def _norms(self, queries: Sequence[Query], gradients: QueryGradients, mean: bool) -> Tensor:
        """√⟨∇_q, H⁻¹∇_q⟩ of every query, or of their mean: [Q]"""
        if not mean:
            return torch.tensor(gradients.squares, device=self.subject.device).clamp_min(0).sqrt()
        scores = exact_scores(self.subject, self._batches_of(queries), gradients).scores
        return (scores.sum() / len(queries) ** 2).clamp_min(0).sqrt()[None]

    def _batches_of(self, queries: Sequence[Query]) -> list[Any]:
        return [to_device(query.batch, self.subject.device) for query in queries]

    def _share(self, plan: list[list[int]], stage: str | None) -> Iterable[Any]:
        """This rank's batches of a plan."""
        part = share(self.subject.ranks, len(plan))
        return self.subject.batches(plan[part.start : part.stop], stage)


def score_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `scores` and `stored_scores`."""
    mean = settings["mode"] == "mean"
    return {"mean": mean, "by_layer": settings["by_layer"], "unit": settings["unit"]}


@dataclass(frozen=True, eq=False)
class StoreScorer(ExactScorer):
    """Builds a gradient store shard by shard, and scores with it; its subject has its layers alone.

    full: scores exactly, with all layers of the run. opened: the store to score with; None to build
    one. memory: bytes of a block that is read.
    Methods that build take the settings of `Attributor.build`: dim, damping, dtype and seed.
    """

    full: ExactScorer
    opened: Store | None = None
    memory: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the store has all layers of the run."""
        return len(self.subject.layers) == len(self.full.subject.layers)

    @property
    def store(self) -> Store:
        assert self.opened is not None
        return self.opened

    def settled(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """With the damping of the store; refuse another."""
        damping, stored = settings["damping"], self.store.schema.settings["build"]["damping"]
        if damping is not None and damping != stored:
            raise ValueError(
                f"damping {damping:g} differs from that of the store, {stored:g}, by which its "
                "rows are whitened; leave it out, or score exactly (store=False)"
            )
        return {**settings, "damping": float(stored)}

    def answer(
        self, queries: Sequence[Query], settings: Mapping[str, Any], plan: MemoryPlan
    ) -> tuple[Scored, Noise | None]:
        options = score_options(settings)
        scored = self.stored_scores(queries, **options)
        scored, noise = self.calibrated(
            queries, scored, settings["damping"], plan.block, options["mean"]
        )
        if settings["mode"] == "nearest":
            # one row of scores stands for all queries
            noise = replace(noise, standard_error=[max(noise.standard_error)])
        return scored.combined(settings["mode"]), noise

    def encoders(self, settings: Mapping[str, Any]) -> dict[str, Encoder]:
        """Encoders of complete whitened gradients."""
        inverse = self.inverse(settings["damping"])
        return encoders(self.subject.layers, inverse, self.subject.device)

    def shares(self, complete: dict[str, Encoder], seed: int) -> dict[str, Tensor]:
        """The shares of entries, measured on random examples; see `entry_shares`."""
        data, subject = self.subject.data, self.subject
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
        # the noise of scores is measured on other examples, if there are enough
        sample = set(self.sample())
        numbers = sorted(order, key=lambda number: number in sample)[:MEASURED]
        batches = subject.batches(data.plan(sorted(numbers)))
        return entry_shares(subject.model, batches, subject.loss, complete)

    def query_rows(self, by_name: dict[str, Encoder], queries: Sequence[Query]) -> Tensor:
        """Projected gradients of queries: [Q, D]"""
        subject, rows = self.subject, list[Tensor]()
        batches = QueryBatches(self._batches_of(queries), [query.name for query in queries])
        # a query may be a batch of several rows, whose gradients are summed
        collect(subject.model, batches, subject.loss, by_name, lambda r, *_: rows.append(r.sum(0)))
        return torch.stack(rows).float().cpu()

    def stored_scores(
        self,
        queries: Sequence[Query],
        *,
        mean: bool = False,
        by_layer: bool = False,
        unit: bool = False,
    ) -> Scored:
        """Products of the queries' rows with all rows of the store, read block by block."""
        store = self.store
        entries = read_entries(store.folder, store.schema)
        complete = self.encoders(store.schema.settings["build"])
        rows = self.query_rows(with_entries(complete, entries, self.subject.device), queries)
        rows = rows.mean(0, keepdim=True) if mean else rows
        columns = [store.columns(layer.name) for layer in self.subject.layers]
        ranks = self.subject.ranks
        columns = columns if by_layer else [slice(None)]
        parts = [torch.zeros(len(rows), len(columns), 0)]
        with together(ranks, "scoring shards"):
            for block in store.blocks(self.memory, share(ranks, store.schema.shards)):
                stored = block.float()
                parts.append(torch.stack([rows[:, c] @ stored[:, c].mT for c in columns], 1))
        total = side_by_side(ranks, torch.cat(parts, 2))
        lengths = None
        if unit:
            roots = store.extra("square").clamp_min(0).sqrt()
            lengths = (rows.norm(dim=1)[:, None] * roots).clamp_min(TINY)
        return Scored(total.sum(1), total if by_layer else None, lengths, store.extra("loss"))

    def sample(self) -> list[int]:
        """Examples on which projected scores are compared with exact ones."""
        return spread(len(self.subject.data), min(SAMPLE, len(self.subject.data)))

    def calibrated(
        self, queries: Sequence[Query], scored: Scored, damping: float, block: int, mean: bool
    ) -> tuple[Scored, Noise]:
        """Scores on the scale of exact ones, and their noise, by a sample of examples.

        Scores, or cosines, of a query are multiplied by one number, the least-squares fit to the
        exact ones of the same layers: entries that are not stored would have added to most
        products. The noise is the difference from exact scores of all layers.
        """
        sample, unit = self.sample(), scored.lengths is not None
        options: dict[str, Any] = {"block": block, "mean": mean, "unit": unit, "numbers": sample}
        exact = self.scores(queries, damping, **options).comparable()
        projected = scored.comparable()[:, sample]
        slopes = (exact * projected).sum(1) / projected.square().sum(1).clamp_min(TINY)
        slopes = torch.where(slopes > 0, slopes, 1.0)[:, None]
        by_layer = None if scored.by_layer is None else scored.by_layer * slopes[:, None]
        scaled = scored._replace(scores=scored.scores * slopes, by_layer=by_layer)
        if not self.is_complete:
            exact = self.full.scores(queries, damping, **options).comparable()
        return scaled, noise(exact, projected * slopes)

    def chosen_dim(
        self, settings: Mapping[str, Any], queries: Sequence[Query], memory: int, block: int
    ) -> int:
        """A small dimension whose scores agree with exact ones of the same layers on a sample.

        memory: limit of the store, in bytes; block: queries of a pass of exact scores.
        """
        data, sample = self.subject.data, self.sample()
        if not queries:
            numbers = spread(len(data), min(ASKED, len(data)))
            queries = [Query(data.batch([n]), (Shown(title=data.ids[n]),), "") for n in numbers]
        queries = queries[:ASKED]
        exact = self.scores(queries, settings["damping"], block=block, numbers=sample).scores
        complete = self.encoders(settings)
        shares = self.shares(complete, settings["seed"])
        tried: list[str] = []

        def measure(dim: int) -> float:
            by_name = with_entries(complete, largest_entries(shares, dim), self.subject.device)
            correlation = noise(exact, self._products(by_name, queries, sample)).spearman
            tried.append(f"{correlation:.2f} with dim {dim}")
            self.subject.progress(f"rank correlation with exact scores: {tried[-1]}", 0, 0)
            return correlation

        dim = choose_dim(self.subject.layers, len(data), memory, measure, SPEARMAN)
        if self.subject.ranks is not None:
            self.subject.ranks.agree("the dimension of the store", dim)
        if dim is None:
            raise ValueError(
                f"no store of {len(data):,} examples within {render.memory(memory)} has a rank "
                f"correlation of {SPEARMAN} with exact scores ({', '.join(tried) or 'none fits'}); "
                "score exactly (store=False), or give a dim or more memory"
            )
        return dim

    def computed_scores(
        self, settings: Mapping[str, Any], queries: Sequence[Query], numbers: Sequence[int]
    ) -> Tensor:
        """Scores [Q, n] of some examples from rows that are computed now and not stored."""
        complete = self.encoders(settings)
        entries = largest_entries(self.shares(complete, settings["seed"]), settings["dim"])
        by_name = with_entries(complete, entries, self.subject.device)
        return self._products(by_name, queries, numbers)

    def _products(
        self, by_name: dict[str, Encoder], queries: Sequence[Query], numbers: Sequence[int]
    ) -> Tensor:
        plan = self.subject.data.plan(numbers)
        rows = self._rows(by_name, plan)[0]
        return self.query_rows(by_name, queries) @ rows[positions(plan, numbers)].mT

    def build(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        recorded: dict[str, Any],
        memory: int,
        restart: bool = False,
    ) -> Store:
        """Write one row per example; ranks share the shards, and finished shards are kept.

        recorded: all settings that the numbers depend on; a store with other settings is refused,
        or removed with `restart`.
        """
        data, ranks, complete = self.subject.data, self.subject.ranks, self.encoders(settings)
        columns = {
            name: width(encoder.layer, settings["dim"]) for name, encoder in complete.items()
        }
        schema = Schema(recorded, columns, len(data), 1, settings["dtype"])
        with in_turn(ranks, "opening the store"):
            store = self._begin(folder, schema, complete, memory, restart)
        with store.in_use():
            self._fill(store, complete)
        with in_turn(ranks, "finishing the store"):
            return store.finish()

    def _begin(
        self, folder: Path, schema: Schema, complete: dict[str, Encoder], memory: int, restart: bool
    ) -> Store:
        """The store to fill, with the entries of its rows chosen."""
        settings = schema.settings["build"]
        folder.mkdir(parents=True, exist_ok=True)
        # two processes must not choose entries at once, which may round differently
        with locked(folder / SCHEMA):
            if restart:
                discard_other(folder, schema)
            if (folder / SCHEMA).exists():
                # as when the build began, also if there is less free memory now
                begun = read_schema(folder)
                per_shard, digest = begun.examples_per_shard, begun.entries
            else:
                per_shard = shard_size(4 * schema.width, len(self.subject.data), memory)
                shares = self.shares(complete, settings["seed"])
                digest = write_entries(folder, largest_entries(shares, settings["dim"]))
            return Store.begin(
                folder, replace(schema, examples_per_shard=per_shard, entries=digest)
            )

    def _fill(self, store: Store, complete: dict[str, Encoder]) -> None:
        """Write this rank's part of the shards that are missing or damaged."""
        data, ranks = self.subject.data, self.subject.ranks
        # one file for all ranks, since another machine may round shares differently
        entries = read_entries(store.folder, store.schema)
        by_name = with_entries(complete, entries, self.subject.device)
        spans = _missing(store, ranks)
        spans = spans if ranks is None else spans[ranks.rank :: ranks.size]
        total, done = sum(span.last - span.first for span in spans), 0
        self.subject.progress("build", 0, total)
        with together(ranks, "building shards"):
            for number, first, last in spans:
                plan = data.plan(range(first, last))
                order = positions(plan, None)
                rows, losses, squares = (x[order] for x in self._rows(by_name, plan))
                extra = {"loss": losses, "square": squares}
                store.write(number, rows, data.ids[first:last], extra)
                done += last - first
                self.subject.progress("build", done, total)

    def _rows(
        self, by_name: dict[str, Encoder], plan: list[list[int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [n, D], losses [n] and ⟨∇, H⁻¹∇⟩ [n] on the CPU, in the order of the plan."""
        subject, parts = self.subject, list[tuple[Tensor, ...]]()

        def take(rows: Tensor, losses: Tensor, squares: Tensor) -> None:
            _check_finite(rows, losses, subject.data, plan[len(parts)])
            parts.append((rows.cpu(), losses.cpu(), squares.cpu()))

        collect(subject.model, subject.batches(plan), subject.loss, by_name, take)
        rows, losses, squares = (torch.cat(part) for part in zip(*parts, strict=True))
        return rows, losses, squares


def projected_layers(layers: Sequence[Layer], lowrank: Sequence[str]) -> list[Layer]:
    """The layers of a store, without embeddings and low-rank heads; refused if there are none."""
    projected = [x for x in layers if x.kind != "index" and x.name not in lowrank]
    if not projected:
        raise ValueError(
            "a store needs a linear, convolution or norm layer, and layers= selects none; score "
            "exactly (store=False)"
        )
    return projected


def positions(plan: list[list[int]], numbers: Sequence[int] | None) -> Tensor:
    """The position of each example in the order of the batches."""
    order = [number for batch in plan for number in batch]
    places = {number: place for place, number in enumerate(order)}
    wanted = sorted(order) if numbers is None else numbers
    return torch.tensor([places[number] for number in wanted])


def _check_finite(rows: Tensor, losses: Tensor, data: Data, numbers: list[int]) -> None:
    finite = rows.isfinite().all(1) & losses.isfinite()
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0, 0])
        raise FloatingPointError(
            f"example {data.ids[numbers[bad]]!r} has a loss of {float(losses[bad]):g} and a "
            "gradient that is not finite; check its data, or leave it out"
        )


def shard_size(row: int, examples: int, memory: int) -> int:
    """Examples per shard: at most an eighth of the memory, and enough shards to be shared."""
    limit = min(SHARD, memory // 8)
    if row > limit:
        raise ValueError(
            f"memory must be eight times a row of {row} bytes, got {memory}; give more "
            "memory, or a smaller dim"
        )
    return max(1, min(examples, limit // row, -(-examples // SHARDS)))


def _missing(store: Store, ranks: Ranks | None) -> list[Span]:
    """The shards to write; ranks share the check of existing ones."""
    if ranks is None:
        return store.missing()
    with together(ranks, "looking for shards"):
        spans = store.missing(range(ranks.rank, store.schema.shards, ranks.size))
    texts = ranks.gather_text(json.dumps([span.number for span in spans]))
    numbers = sorted(number for text in texts for number in json.loads(text))
    return [store.schema.span(number) for number in numbers]
