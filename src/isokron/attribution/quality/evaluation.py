"""A run put to the test: retrained models, labels made wrong, and projections against none.

evaluation/subsets/                 losses of every retrained model
evaluation/mislabelled.safetensors  self-influence and losses where some labels are wrong
evaluation/evaluation.json          what came of it
evaluation/quality.svg              the same as a plot
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from isokron.attribution.asking import Ask, Asker, Query
from isokron.attribution.influence import gradients
from isokron.attribution.quality.measures import compression, lds_by_query
from isokron.attribution.quality.mislabelling import mislabelled
from isokron.attribution.quality.plot import quality_plot
from isokron.attribution.quality.retraining import Retrained, Train, retrain
from isokron.attribution.quality.retraining import subsets as random_subsets
from isokron.attribution.run import Run
from isokron.attribution.scoring import score_data
from isokron.attribution.subject import Subject
from isokron.attribution.verbs import Build, Fit, Progress, fitted, silent
from isokron.files import write_atomically
from isokron.pages.plot import standalone
from isokron.tasks import Shown, Task

FORMAT = "isokron evaluation"
VERSION = 1


def evaluate(
    run: Run,
    train: Train,
    *,
    subsets: int = 50,
    fraction: float = 0.5,
    queries: int = 50,
    dims: Sequence[int] = (8, 16, 32),
    seed: int = 0,
    repeats: int = 1,
    flipped: float = 0.1,
    ask: Ask | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure how far the scores of a run can be trusted, and write it into RUN/evaluation.

    `train(task, indices, seed)`: a new model, trained as the run's own was on these examples.
    `subsets`, `fraction`: how many it is retrained on, and of what part of the examples; `repeats`:
    models of each. `queries`: so many of the first evaluation examples. `dims`: p of projections.
    `flipped`: the part of the labels that is made wrong; 0, and tasks without labels, leave this
    out. `ask`: how H is damped. What was done before it was killed is not done again.
    """
    most = len(run.subject.task.evaluation)
    if not 1 <= queries <= most:
        raise ValueError(f"queries must be from 1 to the {most} of evaluation, got {queries}")
    ask = replace(ask or Ask(), mode="individual", unit=False, by_layer=False, fly=True)
    curvature = fitted(run, "an evaluation")
    settings = {
        "seed": seed,
        "fraction": fraction,
        "flipped": flipped,
        "queries": queries,
        "repeats": repeats,
        "ask": asdict(ask),
    }
    run.enter("evaluate", settings)
    asked = questions(run.subject.task, queries)
    # what can fail at once comes before the hours of retraining
    scores = scores_by_method(run, asked, ask, progress)
    progress("compress", 0, 1)
    own = [query.batch for query in asked]
    damping = ask.damping if ask.kind in ("relative", "factored") else Ask().damping
    by_dim = compression(run.subject, curvature, own, dims, damping=damping)
    progress("compress", 1, 1)
    outcome = _outcome(run, train, subsets, fraction, repeats, seed, asked, progress)
    levels = {name: _summary(lds_by_query(each, outcome)) for name, each in scores.items()}
    found: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        **settings,
        "subsets": subsets,
        "examples": len(run.subject.train),
        "lds": levels,
        "compression": {
            name: {str(p): value for p, value in each.items()} for name, each in by_dim.items()
        },
        "mislabelled": mislabelled(run, _task(run.subject), train, flipped, seed, ask, progress),
    }
    folder = run.folder / "evaluation"
    means = {name: each["mean"] for name, each in levels.items()}
    plot = quality_plot(run.subject.task.name, by_dim, means)
    write_atomically(folder / "quality.svg", [standalone(plot).encode()])
    content = json.dumps(found, indent=1, ensure_ascii=False).encode()
    write_atomically(folder / "evaluation.json", [content, b"\n"])
    return found


def questions(task: Task, count: int) -> list[Query]:
    """The first of the evaluation examples, as queries."""
    batches = [task.evaluation.batch(torch.tensor([k])) for k in range(count)]
    names = [f"evaluation {k}" for k in range(count)]
    return [
        Query(batch, task.show(batch)[0] if task.show else Shown(title=name), name)
        for batch, name in zip(batches, names, strict=True)
    ]


def scores_by_method(
    run: Run, queries: Sequence[Query], ask: Ask, progress: Progress = silent
) -> dict[str, Tensor]:
    """[Q, N] of gradients alone, of the run's curvature, and of its store where that is smaller."""
    subject = run.subject
    own, _ = gradients(
        subject.model, [query.batch for query in queries], subject.loss, subject.sites
    )
    batches = subject.counted(lambda done, total: progress("score", done, total))
    plain = score_data(subject.model, batches, subject.loss, subject.sites, own).of
    method = Fit(**(run.stage("fit") or {})).method
    found = {"gradients": plain, method: Asker(run, ask).scores(queries, progress).of}
    stored = run.stage("build")
    if stored is not None:
        settings = Build(**stored)
        kind = "whitened" if settings.whiten else "plain"
        size = "whole" if settings.dim is None else f"p = {settings.dim}"
        found[f"store, {kind}, {size}"] = Asker(run, replace(ask, fly=False)).scores(queries).of
    return found


def _outcome(
    run: Run,
    train: Train,
    count: int,
    fraction: float,
    repeats: int,
    seed: int,
    asked: Sequence[Query],
    progress: Progress,
) -> Retrained:
    subject = run.subject
    return retrain(
        run.folder / "evaluation" / "subsets",
        _task(subject),
        train,
        random_subsets(count, len(subject.train), fraction, seed),
        [query.batch for query in asked],
        repeats=repeats,
        seed=seed,
        settings={"data": subject.digests()["data"]},
        progress=lambda done, total: progress("retrain", done, total),
    )


def _task(subject: Subject) -> Task:
    """With the examples of the subject only."""
    size = min(subject.task.batch_size, len(subject.train))
    return replace(subject.task, train=subject.train, ids=subject.ids, batch_size=size)


def _summary(each: Tensor) -> dict[str, float]:
    """The mean over queries, and the standard error of it."""
    error = each.std() / len(each) ** 0.5 if len(each) > 1 else torch.tensor(0.0)
    return {"mean": float(each.mean()), "error": float(error)}
