"""The examples that speak most for a query, and most against it."""

from typing import NamedTuple

import torch
from torch import Tensor

from isokron.attribution.scoring import normalized
from isokron.attribution.storage.store import Store

BINS = 40
INDICES = ("exact", "faiss")


class Top(NamedTuple):
    """Numbers of examples and their scores, the largest first and the most negative first."""

    proponents: tuple[Tensor, Tensor]
    opponents: tuple[Tensor, Tensor]


def top(scores: Tensor, count: int) -> Top:
    """Of scores [N]: as many as `count` each way; of equals the first in the data come first."""

    def first(signed: Tensor) -> tuple[Tensor, Tensor]:
        order = signed.argsort(descending=True, stable=True)[:count]
        return order, scores[order]

    return Top(first(scores), first(-scores))


def histogram(scores: Tensor, bins: int = BINS) -> tuple[list[float], list[int]]:
    """Edges and counts over the range of the scores."""
    low, high = float(scores.min()), float(scores.max())
    if not low < high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(scores.double(), bins, low, high)
    return torch.linspace(low, high, bins + 1, dtype=torch.float64).tolist(), counts.int().tolist()


def by_example(scores: Tensor, store: Store) -> Tensor:
    """Scores of rows added up over the rows of each example. [..., rows] → [..., N]"""
    if not store.plan.per_token:
        return scores
    found = scores.new_zeros(*scores.shape[:-1], store.examples)
    return found.index_add_(-1, store.example, scores)


class Faiss:
    """A store in a FAISS index of inner products, for many searches of one store."""

    def __init__(self, store: Store, memory: int, unit: bool = False) -> None:
        try:
            import faiss
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "index 'faiss' needs the package faiss; install it with: pip install faiss-cpu, "
                "or leave the index out: blocked products are exact too",
                name="faiss",
            ) from None
        if store.plan.per_token:
            raise ValueError("index 'faiss' finds rows, and this store has one a token; use exact")
        self.index = faiss.IndexFlatIP(store.width)
        for _, block in store.blocks(memory):
            rows = normalized(block.float()) if unit else block.float()
            self.index.add(rows.contiguous().numpy())
        self.unit = unit

    def top(self, query: Tensor, count: int) -> Top:
        """The foremost examples for a query [1, D], each way."""
        count = min(count, self.index.ntotal)
        query = normalized(query) if self.unit else query

        def search(signed: Tensor) -> tuple[Tensor, Tensor]:
            found, where = self.index.search(signed.contiguous().numpy(), count)
            return torch.from_numpy(where[0]), torch.from_numpy(found[0])

        numbers, scores = search(-query)
        return Top(search(query), (numbers, -scores))
