"""Queries against a run: what is asked about, and the scores of all training examples for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from isokron.attribution.collect import collect
from isokron.attribution.encoding import Encoding
from isokron.attribution.influence import encoded, gradients, preconditioned
from isokron.attribution.ranking import by_example
from isokron.attribution.run import Run, check_same
from isokron.attribution.scoring import MEMORY, Scores, score_data, score_store
from isokron.attribution.storage.store import Store
from isokron.attribution.subject import Counted
from isokron.attribution.verbs import Build, Progress, encoding_of, fitted, silent
from isokron.curvature import Curvature
from isokron.distributed.team import share, side_by_side, together
from isokron.tasks import Shown

MODES = ("individual", "mean", "nearest")
DAMPINGS = ("relative", "absolute", "factored", "pseudo")


@dataclass(frozen=True, eq=False)
class Query:
    """A batch of one example, and what a person sees of it."""

    batch: tuple[Tensor, ...]
    shown: Shown
    name: str


@dataclass(frozen=True)
class Ask:
    """How queries are scored.

    `mode`: each by itself, by their mean gradient, or by the largest score any of them has
    ("nearest"). `unit`: cosines in place of inner products. `damping`, `kind`: of H⁻¹, where the
    store is not whitened: a multiple of the mean eigenvalue, a number ("absolute"), that multiple
    by sides ("factored"), or eigenvalues of zero left out ("pseudo"). `fly`: by a pass over the
    data, even where there is a store.
    """

    mode: str = "individual"
    unit: bool = False
    by_layer: bool = False
    fly: bool = False
    damping: float = 0.1
    kind: str = "relative"

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("kind", DAMPINGS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        if not 0 <= self.damping < float("inf"):
            raise ValueError(f"damping must be a finite number of at least 0, got {self.damping!r}")

    def inverse(self, curvature: Curvature) -> Curvature:
        """H⁻¹, damped as is asked."""
        if self.kind == "pseudo":
            return curvature.power(-1.0, pseudo=True)
        split = "sides" if self.kind == "factored" else "joint"
        return curvature.inverse(self.damping, relative=self.kind != "absolute", split=split)


class Asker:
    """Scores queries against a run, any number of times: from its store, or from its data."""

    def __init__(self, run: Run, ask: Ask | None = None, memory: int = MEMORY) -> None:
        self.run, self.ask, self.memory = run, ask or Ask(), memory
        self.known: dict[Query, Tensor] = {}  # rows of the queries last asked about
        self.settings = _settings(run)
        self.store = None if self.ask.fly or self.settings is None else open_store(run)
        if self.ask.unit and not self.has_lengths:
            raise ValueError(
                "unit scores need rows whose lengths are those of H^(−½)∇: build a whitened store"
            )

    @property
    def whitened(self) -> bool:
        return self.store is not None and self.settings is not None and self.settings.whiten

    @property
    def has_lengths(self) -> bool:
        return self.whitened or (self.store is not None and self.inverse is None)

    @cached_property
    def encoding(self) -> Encoding:
        assert self.settings is not None
        return encoding_of(self.run, self.settings)

    @cached_property
    def inverse(self) -> Curvature | None:
        """H⁻¹; None where no curvature was fitted, and I stands for it."""
        if self.run.stage("fit") is None:
            return None
        return self.ask.inverse(fitted(self.run, "a score"))

    def rows(self, queries: Sequence[Query]) -> Tensor:
        """What queries are in the store: [Q, D], preconditioned where its rows are not."""
        if not all(query in self.known for query in queries):
            self.known = dict(zip(queries, self._rows(queries), strict=True))
        return torch.stack([self.known[query] for query in queries])

    def _rows(self, queries: Sequence[Query]) -> Tensor:
        found: list[Tensor] = []
        subject = self.run.subject

        def take(own: Tensor, losses: Tensor) -> None:
            found.append(own)

        for query in queries:
            if self.whitened:
                collect(subject.model, [query.batch], subject.loss, self.encoding, take)
            else:
                found.append(encoded(self.encoding, self._matrices([query])))
        return torch.cat(found)

    def _matrices(self, queries: Sequence[Query]) -> dict[str, Tensor]:
        """H⁻¹∇ by layer: [Q, B, o, i]"""
        subject = self.run.subject
        batches = [query.batch for query in queries]
        own, _ = gradients(subject.model, batches, subject.loss, subject.sites)
        return own if self.inverse is None else preconditioned(self.inverse, own)

    def scores(self, queries: Sequence[Query], progress: Progress = silent) -> Scores:
        """Of all training examples: [Q, N], or [Q, layers, N]; Q is one but for single queries."""
        if not queries:
            raise ValueError("give at least one query, got none")
        found = self._from_data(queries, progress) if self.store is None else self._stored(queries)
        if self.ask.mode == "nearest":
            return Scores(found.of.amax(0, keepdim=True), found.layers)
        return found

    def _stored(self, queries: Sequence[Query]) -> Scores:
        assert self.store is not None
        rows = self.rows(queries)
        if self.ask.mode == "mean":
            rows = rows.mean(0, keepdim=True)
        unit, by_layer = self.ask.unit, self.ask.by_layer
        ranks = self.run.ranks
        own = share(ranks, len(self.store.shards))
        with together(ranks, "scoring shards"):
            found = score_store(
                self.store, rows, by_layer=by_layer, unit=unit, memory=self.memory, shards=own
            )
        scores = side_by_side(ranks, found.of)
        return Scores(by_example(scores, self.store), found.layers)

    def _from_data(self, queries: Sequence[Query], progress: Progress) -> Scores:
        """As many queries to a pass as memory holds the gradients of."""
        subject = self.run.subject
        size = 4 * sum(_numel(site.layout.shape) for site in subject.sites)
        some = len(queries) if self.ask.mode == "mean" else max(1, self.memory // size)
        parts = []
        for first in range(0, len(queries), some):
            own = self._matrices(queries[first : first + some])
            if self.ask.mode == "mean":
                own = {name: each.mean(0, keepdim=True) for name, each in own.items()}
            batches = subject.counted(lambda done, total: progress("score", done, total))
            parts.append(self._passed(batches, own))
        return Scores(torch.cat([part.of for part in parts]), parts[0].layers)

    def _passed(self, batches: Counted, queries: dict[str, Tensor]) -> Scores:
        """One pass over the data, which ranks share."""
        subject, ranks, by_layer = self.run.subject, self.run.ranks, self.ask.by_layer
        own = share(ranks, len(batches))
        part = None if ranks is None else own.start
        with together(ranks, "scoring examples"):
            found = score_data(
                subject.model,
                batches[own.start : own.stop],
                subject.loss,
                subject.sites,
                queries,
                by_layer=by_layer,
                part=part,
            )
        return Scores(side_by_side(ranks, found.of), found.layers)

    def token_scores(self, query: Query, examples: Sequence[int]) -> list[list[float]]:
        """Of every position of some training examples; they add up to the scores of examples."""
        subject = self.run.subject
        if self.store is None:
            own = self._matrices([query])
        else:
            own = self.encoding.pulled(self.rows([query]))
        batch = subject.train.batch(torch.as_tensor(examples))
        found = score_data(subject.model, [batch], subject.loss, subject.sites, own, tokens=True)
        rows: list[list[float]] = found.of[0].tolist()
        return rows


def open_store(run: Run) -> Store:
    """The run's store, checked to be of its model, data and settings."""
    store = Store.open(run.gradients)
    wanted: dict[str, Any] = {"build": run.stage("build"), **run.subject.digests()}
    there = {name: store.settings.get(name) for name in wanted}
    check_same(run.gradients, "store", there, wanted)
    return store


def _settings(run: Run) -> Build | None:
    known = run.stage("build")
    return None if known is None else Build(**known)


def _numel(shape: tuple[int, int, int]) -> int:
    blocks, outputs, inputs = shape
    return blocks * outputs * inputs
