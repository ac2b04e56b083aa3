"""Exact scores: one pass over the training data for every block of queries."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isokron.attribution.data import Subject, to_device
from isokron.attribution.queries import Query
from isokron.attribution.score import QueryGradients, exact_scores, query_gradients
from isokron.curvature import Curvature
from isokron.distributed.team import share, side_by_side, together

TINY = 1e-30


class Scored(NamedTuple):
    """scores [Q, N]; on request by_layer [Q, layers, N] and lengths |q||t| [Q, N]."""

    scores: Tensor
    by_layer: Tensor | None = None
    lengths: Tensor | None = None
    losses: Tensor | None = None  # [N]

    def comparable(self) -> Tensor:
        """Scores, or cosines if there are lengths: [Q, N]"""
        return self.scores if self.lengths is None else self.scores / self.lengths


@dataclass(frozen=True, eq=False)
class ExactScorer:
    """Exact scores of a subject. inverse: damping → H⁻¹, or None for the identity."""

    subject: Subject
    inverse: Callable[[float], Curvature | None]

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


def positions(plan: list[list[int]], numbers: Sequence[int] | None) -> Tensor:
    """The position of each example in the order of the batches."""
    order = [number for batch in plan for number in batch]
    places = {number: place for place, number in enumerate(order)}
    wanted = sorted(order) if numbers is None else numbers
    return torch.tensor([places[number] for number in wanted])
