"""Scores as a tensor that knows its examples, and as the JSON that a page is made from."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from isokron.attribution.queries import Query
from isokron.files import write_atomically

FORMAT, VERSION = "isokron scores", 2
BINS = 40
NOISE = 2.0  # standard errors below which a score says nothing


class Ranked(NamedTuple):
    """One training example among the top of a query."""

    example: int
    id: str
    score: float


class Top(NamedTuple):
    """Proponents, the largest score first, and opponents, the most negative first."""

    proponents: list[Ranked]
    opponents: list[Ranked]


class Scores(Tensor):
    """Influence of all training examples on queries, a tensor [queries, examples] on the CPU.

    Operations on it give plain tensors.

    Attributes:
        ids: names of the examples.
        layers: names of the layers of `by_layer`.
        noise: None for exact scores; else the measured agreement with exact ones.
        why: how the scores were computed, and why so.
        answers: what was written down of every query, as in the JSON; empty with save=False.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    ids: list[str]
    layers: tuple[str, ...]
    noise: Any
    why: str
    answers: list[dict[str, Any]]
    _by_layer: Tensor | None
    _compute: dict[str, Callable[[], Any]]

    @staticmethod
    def of(
        scores: Tensor,
        ids: list[str],
        *,
        by_layer: Tensor | None = None,
        layers: Sequence[str] = (),
        noise: Any = None,
        why: str = "",
        compute: dict[str, Callable[[], Any]] | None = None,
    ) -> "Scores":
        result = scores.as_subclass(Scores)
        result.ids, result.noise, result.why = ids, noise, why
        result.layers, result._by_layer = tuple(layers), by_layer
        result._compute, result.answers = compute or {}, []
        return result

    def top(self, count: int = 10) -> list[Top]:
        """The strongest proponents and opponents of every query."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        rows = self.as_subclass(Tensor)
        return [Top(*(self._ranked(row, numbers) for numbers in top(row, count))) for row in rows]

    @property
    def by_layer(self) -> Tensor:
        """Scores of every layer, [queries, layers, examples]; computed when first asked for."""
        if self._by_layer is None:
            self._by_layer, self.layers = self._compute["by_layer"]()
        return self._by_layer

    @property
    def tokens(self) -> list[dict[int, list[float]]]:
        """For every query, scores of the tokens of its ten strongest examples of either sign."""
        result: list[dict[int, list[float]]] = self._compute["tokens"]()
        return result

    def _ranked(self, row: Tensor, numbers: list[int]) -> list[Ranked]:
        return [Ranked(number, self.ids[number], float(row[number])) for number in numbers]


def top(scores: Tensor, count: int) -> tuple[list[int], list[int]]:
    """Numbers of the largest positive and of the most negative scores [N]; the first of equals."""
    order = scores.argsort(descending=True, stable=True)[:count]
    opposite = (-scores).argsort(descending=True, stable=True)[:count]
    positive = [int(n) for n in order if scores[n] > 0]
    negative = [int(n) for n in opposite if scores[n] < 0]
    return positive, negative


def histogram(scores: Tensor, bins: int = BINS) -> tuple[list[float], list[int]]:
    """Edges and counts over the range of the scores."""
    low, high = float(scores.min()), float(scores.max())
    if not low < high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(scores.double(), bins, low, high)
    return torch.linspace(low, high, bins + 1, dtype=torch.float64).tolist(), counts.int().tolist()


def check_finite(scores: Tensor, queries: Sequence[Query], ids: Sequence[str]) -> None:
    """Refuse scores that are not numbers, naming the query and the example."""
    finite = scores.isfinite()
    if bool(finite.all()):
        return
    query, example = (int(n) for n in (~finite).nonzero()[0])
    name = queries[min(query, len(queries) - 1)].name
    raise FloatingPointError(
        f"the score of example {ids[example]!r} for query {name!r:.60} is "
        f"{float(scores[query, example])}; look at its data, or fit with more damping"
    )


def name_of(queries: Sequence[Query], settings: dict[str, Any]) -> str:
    """A file name that the queries and settings determine."""
    digest = hashlib.sha256(json.dumps([settings, [q.name for q in queries]]).encode())
    for query in queries:
        _update(digest, query.batch)
    return digest.hexdigest()[:12]


def _update(digest: Any, batch: Any) -> None:
    if isinstance(batch, Tensor):
        flat = batch.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(batch, dict):
        for key in batch:
            _update(digest, batch[key])
    elif isinstance(batch, tuple | list):
        for part in batch:
            _update(digest, part)


def write_scores(folder: Path, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Both files, each whole or not at all; the JSON last, since readers look for it."""
    folder.mkdir(exist_ok=True)
    name = record["name"]
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    write_atomically(folder / f"{name}.safetensors", [save(contiguous)])
    head = {"format": FORMAT, "version": VERSION}
    content = json.dumps({**head, **record}, ensure_ascii=False, indent=1, allow_nan=False)
    write_atomically(folder / f"{name}.json", [content.encode(), b"\n"])
