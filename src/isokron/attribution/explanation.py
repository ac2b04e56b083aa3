"""What is written down of scores: the top examples of every query, token by token, in context."""

import json
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isokron.attribution.data import to_device
from isokron.attribution.queries import Query
from isokron.attribution.results import NOISE, Scores, histogram, name_of, top, write_scores
from isokron.attribution.verify import verify
from isokron.distributed.team import in_turn, share, together
from isokron.tasks import Shown

if TYPE_CHECKING:
    from isokron.attribution.attributor import Attributor

RULE = "{:g} of each layer's mean eigenvalue, split over the two sides of the curvature"
EKFAC_RULE = "{:g} of each layer's mean eigenvalue, added to all its eigenvalues"


@dataclass
class Details:
    """What one query needs beyond its scores.

    tokens: by example, scores of its positions; lengths: |q||t|, of which a score is the cosine's
    multiple.
    """

    loss: float | None = None
    token_losses: list[float] = field(default_factory=list)
    token_scores: list[float] = field(default_factory=list)
    said: str | None = None
    tokens: dict[int, list[float]] = field(default_factory=dict)
    lengths: dict[int, float] = field(default_factory=dict)


class Explanation:
    """The record of one call of `Attributor.score`."""

    def __init__(
        self,
        attributor: "Attributor",
        queries: Sequence[Query],
        scores: Scores,
        settings: Mapping[str, Any],
        losses: Tensor,
        name: str | None,
    ) -> None:
        self.attributor, self.queries, self.scores = attributor, queries, scores
        self.values = scores.as_subclass(Tensor)
        self.settings, self.losses = dict(settings), losses.tolist()
        self.name = name or name_of(queries, self.settings)
        one_by_one = settings["mode"] == "individual"
        self.asked = [(query,) for query in queries] if one_by_one else [tuple(queries)]

    def write(self) -> list[dict[str, Any]]:
        """Answer every query, ranks sharing them, and write the record; the answers."""
        subject, folder = self.attributor.subject, self.attributor.folder
        own = share(subject.ranks, len(self.asked))
        answers: dict[int, Any] = {}
        with together(subject.ranks, "answering queries"):
            for number in own:
                answers[number] = self._answer(number)
                subject.progress("answer", len(answers), len(own))
        if subject.ranks is not None:
            texts = subject.ranks.gather_text(json.dumps(answers))
            answers = {int(k): v for text in texts for k, v in json.loads(text).items()}
        with in_turn(subject.ranks, "writing scores"):
            if folder.leads:
                tensors = {"scores": self.values}
                if self.settings["by_layer"]:
                    tensors["by_layer"] = self.scores.by_layer
                record = {**self._head(), "answers": [answers[k] for k in sorted(answers)]}
                write_scores(folder.scores, record, tensors)
        return [answers[k] for k in sorted(answers)]

    def _head(self) -> dict[str, Any]:
        attributor, settings, noise = self.attributor, self.settings, self.scores.noise
        fit = attributor.folder.stage("fit") or {"method": "none", "fisher": "none"}
        build = attributor.folder.stage("build") if settings["store"] else None
        given, selection = attributor.given, attributor.selection
        rule = EKFAC_RULE if fit["method"] == "ekfac" else RULE
        rule = "no curvature was fitted: H is the identity" if fit["method"] == "none" else rule
        model = given.get("model") or given.get("task") or type(attributor.subject.model).__name__
        return {
            "name": self.name,
            "command": command_of(given, fit, build, settings, self.queries),
            "run": {
                "model": model,
                "data": given.get("data") or "",
                "examples": len(attributor.data),
                "terms": self._terms(),
            },
            "method": {
                "method": fit["method"],
                "fisher": fit["fisher"],
                "damping": settings["damping"],
                "damping_rule": rule.format(settings["damping"]),
                "scoring": "store" if settings["store"] else "exact",
                "why": self.scores.why,
                "dim": (build or {}).get("dim") or None,
                "mode": settings["mode"],
                "unit": settings["unit"],
                "coverage": {
                    "covered": selection.covered,
                    "total": selection.total,
                    "summary": selection.summary(),
                    "left_out": [asdict(layer) for layer in selection.left_out],
                },
            },
            "noise": noise and {"spearman": noise.spearman, "sample": noise.sample},
            "layers": list(self.scores.layers),
            "queries": [query.name for query in self.queries],
        }

    def _terms(self) -> float | None:
        """Loss terms that the curvature is a mean over."""
        curvature = self.attributor.curvature
        return None if curvature is None else next(iter(curvature.layers.values())).terms

    def _answer(self, number: int) -> dict[str, Any]:
        queries, row = self.asked[number], self.values[number]
        signs = top(row, self.settings["top"])
        query = queries[0] if len(queries) == 1 else None
        details = Details() if query is None else self._details(query, signs)
        noise, positive = self.scores.noise, float(row.clamp_min(0).sum())
        error = None if noise is None else noise.standard_error[number]
        shown = [shown for query in queries for shown in query.shown]

        def items(numbers: list[int]) -> list[dict[str, Any]]:
            return [self._item(n, number, positive, error, details) for n in numbers]

        return {
            "query": ", ".join(query.name for query in queries),
            "shown": [one.to_json() for one in shown],
            "loss": details.loss,
            "tokens_counted": sum(loss != 0 for loss in details.token_losses) or None,
            "token_losses": details.token_losses,
            "token_scores": details.token_scores,
            "said": details.said,
            "generated": any(one.generated for one in shown),
            "standard_error": error,
            "positive": positive,
            "calibration": None,
            "verify": None if query is None else self._verify(query, signs),
            "proponents": items(signs[0]),
            "opponents": items(signs[1]),
            "histogram": list(histogram(row)),
        }

    def _details(self, query: Query, signs: tuple[list[int], list[int]]) -> Details:
        """What the model says of the query, and where in it and in the examples influence lies."""
        attributor, damping = self.attributor, self.settings["damping"]
        exact, task = attributor.exact, attributor.task
        gradients = exact.of_query(query, damping)
        count = len(query.shown[0].tokens)
        details = Details(gradients.losses[0], aligned(gradients.token_losses[0], count))
        if task is not None and task.said is not None:
            batch = to_device(query.batch, attributor.subject.device)
            details.said = task.said(attributor.subject.model, batch)
        numbers = [*signs[0], *signs[1]]
        if not numbers:
            return details
        details.tokens, squares = exact.examine(numbers, gradients, damping)
        norm = max(0.0, gradients.squares[0]) ** 0.5
        details.lengths = {n: max(norm * square**0.5, 1e-30) for n, square in squares.items()}
        if self.settings["unit"]:  # so that they add up to the cosine that is shown
            for n, values in details.tokens.items():
                details.tokens[n] = [value / details.lengths[n] for value in values]
        if signs[0] and count > 1:
            scores = exact.query_tokens(query, signs[0], damping)
            details.token_scores = aligned(scores, count)
        return details

    def _item(
        self, example: int, number: int, positive: float, error: float | None, details: Details
    ) -> dict[str, Any]:
        data, settings = self.attributor.data, self.settings
        score = float(self.values[number, example])
        shown = shown_example(self.attributor, example)
        length = details.lengths.get(example)
        # by the exact score, also where the one that ranks is projected
        exact = sum(details.tokens.get(example, []))
        cosine = score if settings["unit"] else exact / length if length else None
        tokens = len(shown.tokens)
        layers = self.scores.by_layer[number, :, example].tolist() if settings["by_layer"] else []
        return {
            "example": example,
            "id": data.ids[example],
            "score": score,
            "share": score / positive if positive > 0 else 0.0,
            "nats": None,
            "per_token": score / tokens if tokens > 1 else None,
            "cosine": cosine,
            "tokens_counted": tokens or None,
            "loss": self.losses[example],
            "noisy": error is not None and abs(score) < NOISE * error,
            "tokens": aligned(details.tokens.get(example, []), len(shown.tokens)),
            "layers": layers,
            "shown": shown.to_json(),
        }

    def _verify(self, query: Query, signs: tuple[list[int], list[int]]) -> dict[str, Any] | None:
        """Real steps on the top examples; None if not asked for, or without proponents."""
        proponents, opponents = signs
        if not self.settings["verify"] or not proponents:
            return None
        subject = self.attributor.subject
        others = sorted(set(range(len(subject.data))) - {*proponents, *opponents})
        drawn = random.Random(0).sample(others, min(len(proponents), len(others))) or proponents
        changes = verify(
            subject.model,
            subject.loss,
            to_device(query.batch, subject.device),
            subject.batch,
            {"proponents": proponents, "random": drawn, "opponents": opponents},
        )
        return {"examples": len(proponents), **changes}


def shown_example(attributor: "Attributor", number: int) -> Shown:
    """What a person sees of a training example."""
    return attributor.show(attributor.data.batch([number]))[0]


def token_table(
    attributor: "Attributor",
    queries: Sequence[Query],
    scores: Scores,
    settings: Mapping[str, Any],
) -> list[dict[int, list[float]]]:
    """For every query, token scores of its ten strongest examples of either sign."""
    table = []
    for query, row in zip(queries, scores.as_subclass(Tensor), strict=False):
        numbers = [number for sign in top(row, 10) for number in sign]
        gradients = attributor.exact.of_query(query, settings["damping"])
        tokens, _ = attributor.exact.examine(numbers, gradients, settings["damping"])
        table.append(tokens)
    return table


def aligned(values: Sequence[float], count: int) -> list[float]:
    """Values of the last `count` positions that have any: those of the tokens that are shown.

    Positions before them belong to the context, and positions after them are padding.
    """
    end = max((k + 1 for k, value in enumerate(values) if value != 0), default=0)
    end = max(end, min(count, len(values)))
    return list(values[max(0, end - count) : end]) if count else []


def command_of(
    given: Mapping[str, Any],
    fit: Mapping[str, Any],
    build: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    queries: Sequence[Query],
) -> str | None:
    """The command that makes these scores in a folder RUN; None for a run made in Python."""
    if not given:
        return None
    words = ["isokron", "attribute", "RUN"]
    options = {**given, "method": fit["method"], "fisher": fit["fisher"]}
    options |= {"fit_examples": fit.get("examples"), "mode": settings["mode"]}
    options["top"] = settings["top"]
    if build is not None:
        options |= {"dim": build["dim"], "store_dtype": build["dtype"]}
    for key, value in options.items():
        for part in value if isinstance(value, list | tuple) else [value]:
            name = key.replace("_", "-")
            if isinstance(part, bool):
                words.append(f"--{name}" if part else f"--no-{name}")
            elif part is not None and part != "":
                words += [f"--{name}", shlex.quote(str(part))]
    for flag in ("unit", "by_layer", "verify"):
        words += [f"--{flag.replace('_', '-')}"] if settings[flag] else []
    return " ".join([*words, *(shlex.quote(word) for query in queries for word in query.words)])
