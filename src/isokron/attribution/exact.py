"""Scores without a store: every block of queries takes a pass over the training data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from isokron.attribution.data import Subject, to_device
from isokron.attribution.queries import Query
from isokron.attribution.score import (
    QueryGradients,
    SquaredLengths,
    exact_scores,
    gradient_passes,
    query_gradients,
)
from isokron.curvature import Curvature
from isokron.distributed.team import share, side_by_side, together

TINY = 1e-30


class Scored(NamedTuple):
    """scores [Q, N]; by_layer [Q, layers, N] and lengths |q||t| [Q, N] if asked for."""

    scores: Tensor
    by_layer: Tensor | None = None
    lengths: Tensor | None = None
    losses: Tensor | None = None  # [N]


@dataclass(frozen=True, eq=False)
class ExactScorer:
    """`inverse`: H⁻¹ by damping, None for the identity."""

    subject: Subject
    inverse: Callable[[float], Curvature | None]
    # of the last block of queries, which are asked for again when answers are written
    last: dict[float, tuple[list[Query], QueryGradients]] = field(default_factory=dict)

    def of_query(self, query: Query, damping: float) -> QueryGradients:
        """H⁻¹∇ of one query, of the last block that was scored if it is among them."""
        queries, gradients = self.last.get(damping, ([], QueryGradients()))
        for number, other in enumerate(queries):
            if other is query:
                return gradients.select(number)
        return self.gradients([query], damping)

    def gradients(
        self, queries: Sequence[Query], damping: float, mean: bool = False
    ) -> QueryGradients:
        """H⁻¹∇ of every query; with `mean`, of the sum of all."""
        subject = self.subject
        batches = [to_device(query.batch, subject.device) for query in queries]
        groups = [0] * len(queries) if mean else None
        return query_gradients(
            subject.model,
            batches,
            subject.loss,
            subject.layers,
            self.inverse(damping),
            groups,
            names=[query.name for query in queries],
        )

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
        """Of all examples, or of those of some `numbers`; `block`: queries that a pass may hold."""
        subject = self.subject
        plan = subject.data.plan(numbers)
        own = share(subject.ranks, len(plan))
        batches = subject.batches(plan[own.start : own.stop], None if numbers else "score")
        parts, lengths, losses = [], [], torch.zeros(0)
        step = len(queries) if mean else block
        for first in range(0, len(queries), step):
            asked = queries[first : first + step]
            self.last.clear()  # before the next block takes its memory
            gradients = self.gradients(asked, damping, mean)
            if not mean:
                self.last[damping] = list(asked), gradients
            squares = SquaredLengths(self.inverse(damping)) if unit else None
            with together(subject.ranks, "scoring examples"):
                part, losses = exact_scores(
                    subject.model,
                    batches,
                    subject.loss,
                    subject.layers,
                    gradients,
                    by_layer=by_layer,
                    lengths=squares,
                )
            parts.append(part / (len(queries) if mean else 1))
            if squares is not None:
                totals = side_by_side(subject.ranks, squares.total(subject.device))
                roots = totals.clamp_min(0).sqrt()
                lengths.append(self.norms(asked, gradients, mean)[:, None] * roots)
        order = positions(plan, numbers)
        scores = side_by_side(subject.ranks, torch.cat(parts)).cpu()[..., order]
        losses = side_by_side(subject.ranks, losses).cpu()[order]
        products = torch.cat(lengths).cpu()[:, order].clamp_min(TINY) if lengths else None
        if by_layer:
            return Scored(scores.sum(1), scores, products, losses)
        return Scored(scores, None, products, losses)

    def norms(
        self, queries: Sequence[Query], gradients: QueryGradients, mean: bool = False
    ) -> Tensor:
        """√⟨∇_q, H⁻¹∇_q⟩ of every query, or of their mean: [Q]"""
        if not mean:
            return torch.tensor(gradients.squares, device=self.subject.device).clamp_min(0).sqrt()
        subject = self.subject
        batches = [to_device(query.batch, subject.device) for query in queries]
        scores, _ = exact_scores(subject.model, batches, subject.loss, subject.layers, gradients)
        return (scores.sum() / len(queries) ** 2).clamp_min(0).sqrt()[None]

    def examine(
        self, numbers: Sequence[int], gradients: QueryGradients, damping: float
    ) -> tuple[dict[int, list[float]], dict[int, float]]:
        """By example: scores of its positions for the first query, and ⟨∇, H⁻¹∇⟩."""
        subject = self.subject
        squares = SquaredLengths(self.inverse(damping))
        tokens: dict[int, list[float]] = {}
        plan = subject.data.plan(numbers)
        for batch in plan:
            scores, _ = exact_scores(
                subject.model,
                [subject.batch(batch)],
                subject.loss,
                subject.layers,
                gradients,
                tokens=True,
                lengths=squares,
            )
            tokens |= dict(zip(batch, scores[0].tolist(), strict=True))
        order = [number for batch in plan for number in batch]
        return tokens, dict(zip(order, squares.total().clamp_min(0).tolist(), strict=True))

    def query_tokens(self, query: Query, numbers: Sequence[int], damping: float) -> list[float]:
        """How much of the influence of some examples falls on each position of a query."""
        subject = self.subject
        plan = subject.data.plan(numbers)
        examples = query_gradients(
            subject.model,
            [subject.batch(batch) for batch in plan],
            subject.loss,
            subject.layers,
            self.inverse(damping),
            [0] * len(plan),
        )
        batch = to_device(query.batch, subject.device)
        scores, _ = exact_scores(
            subject.model, [batch], subject.loss, subject.layers, examples, tokens=True
        )
        values: list[float] = scores[0].sum(0).tolist()
        return values

    def self_influence(self, damping: float) -> Tensor:
        """⟨∇, H⁻¹∇⟩ of every training example: [N]"""
        subject = self.subject
        plan = subject.data.plan()
        own = share(subject.ranks, len(plan))
        squares = SquaredLengths(self.inverse(damping))
        with together(subject.ranks, "scoring examples"):
            batches = subject.batches(plan[own.start : own.stop], "score")
            passes = gradient_passes(subject.model, batches, subject.loss, subject.layers)
            passes.over(squares.take, lambda: squares.after(passes.losses), check=False)
        totals = side_by_side(subject.ranks, squares.total(subject.device))
        return totals.cpu()[positions(plan, None)]


def positions(plan: list[list[int]], numbers: Sequence[int] | None) -> Tensor:
    """Where in the order of the batches each example stands."""
    order = [number for batch in plan for number in batch]
    places = {number: place for place, number in enumerate(order)}
    wanted = sorted(order) if numbers is None else numbers
    return torch.tensor([places[number] for number in wanted])
