"""Answers to queries: scores of all examples, the foremost by name, and their files.

scores/NAME.safetensors   scores [Q, N], or with layers also by_layer [Q, layers, N]
scores/NAME.json          queries, settings, and the foremost examples of each
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from isokron.attribution.asking import Ask, Asker, Query
from isokron.attribution.ranking import Top, histogram, top
from isokron.attribution.run import Run
from isokron.attribution.subject import Subject, shown_of
from isokron.attribution.verbs import Progress, silent
from isokron.distributed.team import gather, in_turn, share, together
from isokron.files import write_atomically
from isokron.tasks import Shown

FORMAT = "isokron scores"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Found:
    """One example among the foremost. `tokens`: scores of its positions, which add up to its own;
    `layers`: by layer, if asked for."""

    example: int
    id: str
    score: float
    shown: Shown
    tokens: tuple[float, ...] = ()
    layers: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Answer:
    """What was found for one query, or for all of them together. `histogram`: edges and counts."""

    query: str
    shown: tuple[Shown, ...]
    proponents: tuple[Found, ...]
    opponents: tuple[Found, ...]
    histogram: tuple[tuple[float, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Answers:
    """All of one set of queries. scores: [Q, N], by_layer: [Q, layers, N] or None."""

    name: str
    ask: Ask
    each: tuple[Answer, ...]
    queries: tuple[str, ...]
    count: int
    layers: tuple[str, ...]
    scores: Tensor
    by_layer: Tensor | None = None


def score(
    run: Run,
    queries: Sequence[Query],
    ask: Ask | None = None,
    *,
    count: int = 10,
    name: str | None = None,
    progress: Progress = silent,
    memory: int | None = None,
) -> Answers:
    """Score all training examples for queries, and write the answers down.

    `count`: of proponents and of opponents, each. `name`: of the files, by default one that the
    queries and settings determine.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    asker = Asker(run, ask, **({} if memory is None else {"memory": memory}))
    found = asker.scores(queries, progress)
    scores = found.of.sum(1) if found.layers else found.of
    together = asker.ask.mode != "individual"
    asked = [tuple(queries)] if together else [(query,) for query in queries]
    best = [top(each, count) for each in scores]
    tokens = _all_tokens(asker, asked, best, progress)
    each = []
    for k, some in enumerate(asked):
        layered = found.of[k] if found.layers else None
        each.append(_answer(asker.run.subject, some, scores[k], layered, best[k], tokens.get(k)))
    by_layer = found.of if found.layers else None
    name = name or _name(queries, asker.ask)
    names = tuple(query.name for query in queries)
    result = Answers(name, asker.ask, tuple(each), names, count, found.layers, scores, by_layer)
    with in_turn(run.ranks, "writing scores"):
        if run.leads:
            write(run, result)
    return result


def _all_tokens(
    asker: Asker, asked: Sequence[Sequence[Query]], best: Sequence[Top], progress: Progress
) -> dict[int, Tensor]:
    """By number of the query: scores of the tokens of its foremost examples, in their order; of
    queries that stand alone, where examples have tokens. [examples, S]"""
    subject, ranks = asker.run.subject, asker.run.ranks
    own = share(ranks, len(asked))
    found = {}
    with together(ranks, "scoring tokens"):
        for k in own:
            numbers = _foremost(best[k])
            if len(asked[k]) == 1 and all(shown_of(subject, n).tokens for n in numbers):
                found[k] = torch.tensor(asker.token_scores(asked[k][0], numbers))
            progress("answer", (k - own.start + 1) * len(asked) // len(own), len(asked))
    if ranks is None:
        return found
    every = gather(ranks, {str(k): scores for k, scores in found.items()})
    return {int(k): scores.cpu() for part in every for k, scores in part.items()}


def _foremost(best: Top) -> list[int]:
    """Each once."""
    return list(dict.fromkeys(n for pair in best for n in pair[0].tolist()))


def _answer(
    subject: Subject,
    queries: Sequence[Query],
    scores: Tensor,
    layered: Tensor | None,
    best: Top,
    by_token: Tensor | None,
) -> Answer:
    edges, counts = histogram(scores)
    shown = {n: shown_of(subject, n) for n in _foremost(best)}
    tokens: dict[int, list[float]] = {}
    if by_token is not None:
        tokens = dict(zip(shown, by_token.tolist(), strict=True))

    def found(pair: tuple[Tensor, Tensor]) -> tuple[Found, ...]:
        return tuple(
            Found(
                number,
                subject.ids[number] if subject.ids else str(number),
                value,
                shown[number],
                tuple(tokens.get(number, ())[: len(shown[number].tokens)]),
                tuple(layered[:, number].tolist()) if layered is not None else (),
            )
            for number, value in zip(pair[0].tolist(), pair[1].tolist(), strict=True)
        )

    return Answer(
        ", ".join(query.name for query in queries),
        tuple(query.shown for query in queries),
        found(best.proponents),
        found(best.opponents),
        (tuple(edges), tuple(counts)),
    )


def write(run: Run, answers: Answers) -> None:
    """Both files, each whole; the JSON last, for it is what is looked for."""
    run.scores.mkdir(exist_ok=True)
    tensors = {"scores": answers.scores.contiguous()}
    if answers.by_layer is not None:
        tensors["by_layer"] = answers.by_layer.contiguous()
    write_atomically(run.scores / f"{answers.name}.safetensors", [save(tensors)])
    content = json.dumps(_to_json(answers), ensure_ascii=False, indent=1).encode()
    write_atomically(run.scores / f"{answers.name}.json", [content, b"\n"])


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The records of all sets of queries in a run, by name."""
    found = []
    for path in sorted((folder / "scores").glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}; score anew") from None
        head = record if isinstance(record, dict) else {}
        if (head.get("format"), head.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{path} is not of {FORMAT} version {VERSION}; score anew")
        found.append(record)
    if not found:
        raise FileNotFoundError(f"no scores in {folder}; score some queries first")
    return found


def _to_json(answers: Answers) -> dict[str, Any]:
    def listed(some: Sequence[Found]) -> list[dict[str, Any]]:
        return [_record(each) for each in some]

    return {
        "format": FORMAT,
        "version": VERSION,
        "name": answers.name,
        "ask": asdict(answers.ask),
        "queries": list(answers.queries),
        "count": answers.count,
        "layers": list(answers.layers),
        "answers": [
            {
                "query": each.query,
                "shown": [shown.to_json() for shown in each.shown],
                "proponents": listed(each.proponents),
                "opponents": listed(each.opponents),
                "histogram": [list(part) for part in each.histogram],
            }
            for each in answers.each
        ],
    }


def _record(found: Found) -> dict[str, Any]:
    return {
        "example": found.example,
        "id": found.id,
        "score": found.score,
        "tokens": list(found.tokens),
        "layers": list(found.layers),
        "shown": found.shown.to_json(),
    }


def _name(queries: Sequence[Query], ask: Ask) -> str:
    digest = hashlib.sha256(json.dumps([asdict(ask), [q.name for q in queries]]).encode())
    for query in queries:
        for tensor in query.batch:
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
