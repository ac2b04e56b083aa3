"""Scores as a tensor with the ids of its examples, and as files from which the page is made.

scores/NAME.json         queries, settings, coverage and the top examples, with scores by token
scores/NAME.safetensors  scores of all examples
scores/latest            the NAME of the last call, which the page shows
"""

import json
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from isokron.attribution.data import to_device
from isokron.attribution.queries import Query
from isokron.attribution.scorers import ExactScorer
from isokron.attribution.task_run import UnrolledScorer
from isokron.attribution.verify import calibrate, verify
from isokron.curvature.backward import unchanged
from isokron.digest import hash_of
from isokron.distributed.rank_tasks import in_turn, share, together
from isokron.files import write_atomically, write_json
from isokron.report.attribution import LATEST

if TYPE_CHECKING:
    from isokron.attribution.attributor import Attributor

FORMAT = {"format": "isokron scores", "version": 3}
BINS = 40  # of the histogram of all scores
NOISE = 2.0  # scores below this many standard errors are marked as noisy
TINY = 1e-30
RULES = {
    "none": "no curvature was fitted: H is the identity",
    "unroll": "",
    "ekfac": "{:g} of each layer's mean eigenvalue, added to all its eigenvalues",
    "diagonal": "{:g} of each layer's mean second moment, added to all of them",
}
RULE = "{:g} of each layer's mean eigenvalue, split over the two sides of the curvature"
Signs = tuple[list[int], list[int]]  # indices of proponents and of opponents


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

    Operations on it return plain tensors.

    Attributes:
        ids: names of the examples.
        skipped: why examples that are bad have no scores, by id; see `Attributor(on_bad=…)`.
        layers: names of the layers of `by_layer`.
        coverage: the parameters that the scores cover, and layers that are left out.
        noise: None for exact scores, otherwise their measured agreement with exact scores of all
            layers of the run.
        why: why the scores are exact, or from a store.
        refinement: with `refine`, its steps and relative residuals; else None.
        answers: the record of every query, as in the JSON; empty with save=False.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    ids: list[str]
    skipped: dict[str, str]
    layers: tuple[str, ...]
    coverage: dict[str, Any]
    noise: Any
    why: str
    refinement: dict[str, Any] | None
    answers: list[dict[str, Any]]
    compute_by_layer: Callable[[], Any]
    compute_tokens: Callable[[], list[dict[int, list[float]]]]

    def top(self, count: int = 10) -> list[Top]:
        """The strongest proponents and opponents of every query."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")

        def ranked(row: Tensor, numbers: list[int]) -> list[Ranked]:
            return [Ranked(number, self.ids[number], float(row[number])) for number in numbers]

        rows = self.as_subclass(Tensor)
        return [Top(*(ranked(row, numbers) for numbers in top(row, count))) for row in rows]

    @cached_property
    def by_layer(self) -> Tensor:
        """Scores by layer, [queries, layers, examples]; computed on first access."""
        layered: Tensor = self.compute_by_layer()
        return layered

    @cached_property
    def tokens(self) -> list[dict[int, list[float]]]:
        """For every query, token scores of its ten strongest examples of either sign."""
        return self.compute_tokens()


def top(scores: Tensor, count: int) -> Signs:
    """Indices of the largest positive and of the most negative scores [N]; ties by index."""

    def positive(values: Tensor) -> list[int]:
        order = values.argsort(descending=True, stable=True)[:count]
        return [int(n) for n in order if values[n] > 0]

    return positive(scores), positive(-scores)


def token_table(
    exact: ExactScorer, queries: Sequence[Query], scores: Tensor, settings: Mapping[str, Any]
) -> list[dict[int, list[float]]]:
    """For every query, token scores of its ten strongest examples of either sign."""
    if settings["mode"] != "individual":
        raise ValueError(f"tokens need mode='individual', got {settings['mode']!r}")
    table = []
    for query, row in zip(queries, scores.as_subclass(Tensor), strict=True):
        proponents, opponents = top(row, 10)
        gradients = exact.gradients([query], settings["damping"])
        table.append(exact.example_tokens([*proponents, *opponents], gradients)[0])
    return table


def histogram(scores: Tensor) -> tuple[list[float], list[int]]:
    """Edges and counts of equal bins over the range of the scores."""
    low, high = float(scores.min()), float(scores.max())
    if not low < high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(scores.double(), BINS, low, high)
    return torch.linspace(low, high, BINS + 1, dtype=torch.float64).tolist(), counts.int().tolist()


def check_finite(scores: Tensor, queries: Sequence[Query], ids: Sequence[str]) -> None:
    """Refuse scores that are not finite, naming the query and the example."""
    finite = scores.isfinite()
    if bool(finite.all()):
        return
    query, example = (int(n) for n in (~finite).nonzero()[0])
    name = queries[min(query, len(queries) - 1)].name
    raise FloatingPointError(
        f"the score of example {ids[example]!r} for query {name!r:.60} is "
        f"{float(scores[query, example])}; mend it, or go on without such examples: "
        "on_bad='skip', or use more damping"
    )


def default_name(queries: Sequence[Query], settings: Mapping[str, Any]) -> str:
    """A hash of queries and settings, so that a repeated command overwrites its own file."""
    # more or fewer examples of the same scores are the same scores
    settings = {**settings, "top": None}
    return hash_of([settings, [(query.name, query.batch) for query in queries]])[:12]


@dataclass(frozen=True, eq=False)
class Explanation:
    """The files of one call of `Attributor.score`.

    losses: of all examples, [N]. exact: scores queries without a store.
    """

    attributor: "Attributor"
    queries: Sequence[Query]
    scores: Scores
    settings: dict[str, Any]
    losses: Tensor
    exact: ExactScorer

    def write(self, name: str) -> list[dict[str, Any]]:
        """Compute the record of every query, shared among ranks, write both files, return them."""
        subject, folder = self.attributor.subject, self.attributor.folder
        alone = self.settings["mode"] == "individual"
        asked = [[query] for query in self.queries] if alone else [list(self.queries)]
        numbers = share(subject.ranks, len(asked))
        answers: dict[int, Any] = {}
        with together(subject.ranks, "answering queries"):
            for number in numbers:
                answers[number] = self._answer(asked[number], number)
                subject.progress("answer", len(answers), len(numbers))
        if subject.ranks is not None:
            # every rank returns all answers
            texts = subject.ranks.gather_text(json.dumps(answers))
            answers = {int(k): v for text in texts for k, v in json.loads(text).items()}
        ordered = [answers[number] for number in sorted(answers)]
        record = {**FORMAT, "name": name, **self._head(), "answers": ordered}
        tensors = {"scores": self.scores.as_subclass(Tensor).contiguous()}
        if self.settings["by_layer"]:
            tensors["by_layer"] = self.scores.by_layer.contiguous()
        with in_turn(subject.ranks, "writing scores"):
            if folder.leads:
                folder.scores.mkdir(exist_ok=True)
                # the JSON last, since readers look for it
                write_atomically(folder.scores / f"{name}.safetensors", [save(tensors)])
                write_json(folder.scores / f"{name}.json", record)
                write_atomically(folder.scores / LATEST, [name.encode()])
        return ordered

    def _head(self) -> dict[str, Any]:
        """The command, the model and the settings."""
        a, settings, noise = self.attributor, self.settings, self.scores.noise
        fit = a.folder.stage("fit") or {"method": "none"}
        build = a.folder.stage("build") if settings["store"] else None
        # number of loss terms that the curvature is a mean of
        terms = None if a.curvature is None else next(iter(a.curvature.layers.values())).terms
        # an optimizer counts no terms
        terms = terms or None
        model = a.source.get("model") or a.source.get("task") or type(a.subject.model).__name__
        return {
            "command": command_of(a.source, fit, build, settings, self.queries),
            "run": {
                "model": model,
                "data": a.source.get("data") or "",
                "examples": len(a.data),
                "skipped": a.skipped,
                "terms": terms,
            },
            "method": {
                "method": fit["method"],
                "fisher": fit.get("fisher"),
                "optimizer": fit.get("optimizer"),
                "damping": settings["damping"],
                "damping_rule": RULES.get(fit["method"], RULE).format(settings["damping"]),
                "scoring": "store" if settings["store"] else "exact",
                "why": self.scores.why,
                "refine": self.scores.refinement,
                "dim": (build or {}).get("dim") or None,
                "mode": settings["mode"],
                "unit": settings["unit"],
                "coverage": self.scores.coverage,
            },
            "noise": noise and {"spearman": noise.spearman, "sample": noise.sample},
            "layers": list(self.scores.layers) if settings["by_layer"] else [],
            "queries": [query.name for query in self.queries],
        }

    def _answer(self, queries: Sequence[Query], number: int) -> dict[str, Any]:
        """The record of one query, or of several that were scored together."""
        row, noise = self.scores.as_subclass(Tensor)[number], self.scores.noise
        signs = top(row, self.settings["top"])
        shown = [shown for query in queries for shown in query.shown]
        answer = {
            "query": ", ".join(query.name for query in queries),
            "shown": [example.to_json() for example in shown],
            "loss": None,
            "tokens_counted": None,
            "token_losses": [],
            "token_scores": [],
            "said": None,
            "generated": any(example.generated for example in shown),
            "standard_error": None if noise is None else noise.standard_error[number],
            "positive": float(row.clamp_min(0).sum()),
            "calibration": None,
            "verify": None,
        }
        # scores by token are computed for single queries only
        tokens: dict[int, list[float]] = {}
        cosines: dict[int, float] = {}
        if len(queries) == 1:
            tokens, cosines = self._explain_(answer, queries[0], signs, row)
        for side, numbers in zip(("proponents", "opponents"), signs, strict=True):
            answer[side] = [
                self._item(answer, number, n, tokens.get(n, []), cosines.get(n)) for n in numbers
            ]
        return {**answer, "histogram": list(histogram(row))}

    def _explain_(
        self, answer: dict[str, Any], query: Query, signs: Signs, row: Tensor
    ) -> tuple[dict[int, list[float]], dict[int, float]]:
        """Add loss, prediction, token scores and verification of a single query to its record.

        Returns for every top example the scores of its tokens, and its exact cosine.
        """
        a, damping = self.attributor, self.settings["damping"]
        gradients = self.exact.gradients([query], damping)
        count = len(query.shown[0].tokens)
        losses = aligned(gradients.token_losses[0], count)
        answer |= {"loss": gradients.losses[0], "token_losses": losses}
        answer["tokens_counted"] = sum(loss != 0 for loss in losses) or None
        if a.task is not None and a.task.said is not None:
            batch = to_device(query.batch, a.subject.device)
            with unchanged(a.subject.model):
                answer["said"] = a.task.said(a.subject.model, batch)
        if self.settings["verify"] and signs[0]:
            answer |= self._verify(query, signs, float(sum(row[n] for n in signs[0])))
        if isinstance(a.exact, UnrolledScorer):
            # scores are in nats, and belong to no token and to no layer
            answer["calibration"] = 1.0
            return {}, {}
        if signs[0] and count > 1:
            answer["token_scores"] = aligned(
                self.exact.query_tokens(query, signs[0], damping), count
            )
        tokens, totals, squares = self.exact.example_tokens([*signs[0], *signs[1]], gradients)
        if self.settings["refine"]:
            # norms of examples would take a solve each
            return tokens, {}
        norm = max(0.0, gradients.squares[0]) ** 0.5
        lengths = {n: max(norm * square**0.5, TINY) for n, square in squares.items()}
        if self.settings["unit"]:
            # scaled so that they add up to the cosine
            tokens = {n: [value / lengths[n] for value in tokens[n]] for n in tokens}
        return tokens, {n: totals[n] / lengths[n] for n in totals}

    def _item(
        self,
        answer: Mapping[str, Any],
        query: int,
        example: int,
        token_scores: list[float],
        cosine: float | None,
    ) -> dict[str, Any]:
        """The record of one of the top examples of a query."""
        a, settings = self.attributor, self.settings
        score, positive = float(self.scores[query, example]), answer["positive"]
        error = answer["standard_error"]
        shown = a.show(a.data.batch([example]))[0]
        tokens = len(shown.tokens)
        layers = self.scores.by_layer[query, :, example].tolist() if settings["by_layer"] else []
        return {
            "example": example,
            "id": a.data.ids[example],
            "score": score,
            "share": score / positive if positive > 0 else 0.0,
            "nats": None if answer["calibration"] is None else answer["calibration"] * score,
            "per_token": score / tokens if tokens > 1 else None,
            "cosine": score if settings["unit"] else cosine,
            "tokens_counted": tokens or None,
            "loss": float(self.losses[example]),
            "noisy": error is not None and abs(score) < NOISE * error,
            "tokens": aligned(token_scores, tokens),
            "layers": layers,
            "shown": shown.to_json(),
        }

    def _verify(self, query: Query, signs: Signs, predicted: float) -> dict[str, Any]:
        """Real training steps on the top examples. predicted: sum of the proponents' scores."""
        a, subject, (proponents, opponents) = self.attributor, self.attributor.subject, signs
        # a fixed seed, so that every run draws the same examples
        others = sorted(set(range(len(subject.data))) - {*proponents, *opponents})
        drawn = random.Random(0).sample(others, min(len(proponents), len(others)))
        groups = {"proponents": proponents, "random": drawn, "opponents": opponents}
        batch = to_device(query.batch, subject.device)
        changes = verify(subject, batch, groups)
        inverse, calibration = a.inverse(self.settings["damping"]), None
        # neither cosines nor scores of some layers predict a change of the loss, and refined scores
        # are not those of a step along H⁻¹∇
        partial = self.settings["unit"] or len(self.scores.layers) < len(subject.layers)
        partial = partial or bool(self.settings["refine"])
        if inverse is not None and not partial:
            calibration = calibrate(subject, batch, proponents, inverse, predicted)
        return {"verify": changes, "calibration": calibration}


def aligned(values: Sequence[float], count: int) -> list[float]:
    """Values of the `count` displayed tokens: the last positions with a value other than 0.

    Earlier positions belong to the context, later ones are padding.
    """
    end = max((k + 1 for k, value in enumerate(values) if value != 0), default=0)
    end = max(end, min(count, len(values)))
    return list(values[max(0, end - count) : end]) if count else []


def command_of(
    source: Mapping[str, Any],
    fit: Mapping[str, Any],
    build: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    queries: Sequence[Query],
) -> str | None:
    """The command line that computes these scores; None for a run from Python."""
    if not source:
        return None
    options = dict(source)
    if "optimizer" in fit:
        options["curvature"] = fit.get("checkpoint", "CHECKPOINT")
    else:
        options |= {"method": fit["method"], "fisher": fit.get("fisher")}
    options |= {"fit_examples": fit.get("examples"), "mode": settings["mode"]}
    options["top"] = settings["top"]
    if build is not None:
        options |= {"dim": build["dim"], "store_dtype": build["dtype"]}
    flags = ("unit", "by_layer", "verify", "refine")
    options |= {flag: settings[flag] or None for flag in flags}
    words = ["isokron", "attribute", "RUN"]
    for key, value in options.items():
        name = key.replace("_", "-")
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, bool):
                words.append(f"--{name}" if part else f"--no-{name}")
            elif part is not None and part != "":
                words += [f"--{name}", shlex.quote(str(part))]
    return " ".join([*words, *(shlex.quote(word) for query in queries for word in query.words)])
