"""Measure the quality of scores: retrained models, flipped labels, and projected against exact.

The linear datamodelling score (LDS, Park et al. 2303.14186) of a query is Spearman's ρ over random
subsets of the training examples, between the prediction of the scores and the loss of a model that
was trained on the subset:

    ρ( Σ_{t in subset} score(q, t),  −loss_q(subset) )

subsets/00000-0.json  losses of every retrained model, one file each
mislabelled.json      how well self-influence and losses find flipped labels
evaluation.json       the results

An evaluation that was killed continues from its files, and ends with the same bytes.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isokron.attribution.queries import Query
from isokron.digest import hash_of
from isokron.files import check_same, read_json, write_json
from isokron.tasks import Batch, Examples, Shown, Task
from isokron.training import Progress, digest, silent, task_digest

if TYPE_CHECKING:
    from isokron.attribution.attributor import Attributor

# (task, numbers of the training examples to use, seed) → a model trained on them
Train = Callable[[Task, Tensor, int], nn.Module]


@dataclass(frozen=True)
class Noise:
    """Projected scores compared with exact ones on a sample of examples.

    spearman: mean over queries. standard_error: of a score, for each query. sample: its size.
    """

    spearman: float
    standard_error: list[float]
    sample: int


def noise(exact: Tensor, projected: Tensor) -> Noise:
    """The noise of projected scores. exact, projected: [Q, n]"""
    residual = (projected.cpu().double() - exact.cpu().double()).square().mean(1).sqrt()
    # of one example, or of equal scores, the order cannot differ
    equal = (ranks(exact) == ranks(projected)).all(1)
    correlation = torch.where(equal, 1.0, spearman(exact, projected))
    return Noise(float(correlation.mean()), residual.tolist(), exact.size(1))


def ranks(values: Tensor) -> Tensor:
    """Ranks in ascending order from 0, averaged over ties. [..., n], float64"""
    values = values.detach().cpu().double().contiguous()
    if bool(values.isnan().any()):
        raise ValueError("NaN has no rank; check where the scores or losses come from")
    # equal values have the ranks from `first` to `last` − 1
    ordered = values.sort(-1).values
    first, last = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (first + last - 1).double() / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Rank correlation along the last dimension, [..., n] → [...]; 0 where one is constant."""
    x, y = (ranks(values) for values in (x, y))
    x, y = (values - values.mean(-1, keepdim=True) for values in (x, y))
    lengths = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(lengths > 0, (x * y).sum(-1) / lengths, 0.0)


def mislabel_auc(scores: Tensor, flipped: Tensor) -> float:
    """Area under the ROC curve of finding flipped labels by a score. scores, flipped: [n]"""
    wrong, right = int(flipped.sum()), int((~flipped).sum())
    # Mann–Whitney: the ranks of the flipped examples, less their ranks among themselves
    above = float(ranks(scores)[flipped.cpu()].sum()) - wrong * (wrong - 1) / 2
    return above / (wrong * right)


def lds_by_query(scores: Tensor, members: Tensor, losses: Tensor) -> Tensor:
    """The LDS of scores [Q, N] for every query: [Q]

    members: [K, N], the examples of every subset; losses: [K, Q], of models trained on them.
    """
    return spearman(scores.cpu().double() @ members.double().mT, -losses.mT)


def random_subsets(count: int, examples: int, fraction: float = 0.5, seed: int = 0) -> Tensor:
    """Random subsets of a fraction of the examples: booleans [count, examples]"""
    size = round(fraction * examples)
    if count < 1 or not 0 < size < examples:
        raise ValueError(
            "random_subsets needs a count of at least 1, and a fraction that leaves some of the "
            f"{examples} examples in and some out, got {count} and {fraction}"
        )
    members = torch.zeros(count, examples, dtype=torch.bool)
    # a seed per subset, so that a larger count keeps the models trained so far
    for k in range(count):
        generator = torch.Generator().manual_seed(_seed_of("subset", seed, k))
        members[k, torch.randperm(examples, generator=generator)[:size]] = True
    return members


def retrain(
    folder: Path,
    task: Task,
    train: Train,
    members: Tensor,
    queries: Sequence[Batch],
    *,
    repeats: int = 1,
    seed: int = 0,
    training: str | None = None,
    progress: Progress = silent,
) -> Tensor:
    """Losses [K, Q] of queries, in float64, under models trained on K subsets of the examples.

    Args:
        folder: for the results; models that are in it are not trained again.
        task: its first N training examples are used.
        train: (task, indices, seed) → trained model.
        members: [K, N], booleans.
        queries: batches of any number of examples each.
        repeats: models per subset, with different seeds, whose losses are averaged.
        seed: random seed of all models.
        training: identifies the training, so that models of two are not mixed; default: a digest of
            `train` and of what the task trains on.
        progress: called with the number of models done and their total.
    """
    training = training or training_digest(train, task)
    folder.mkdir(parents=True, exist_ok=True)
    asked = digest([tensor for batch in queries for tensor in batch])
    total, losses = len(members) * repeats, []
    for number in range(total):
        progress("retrain", number, total)
        k, repeat = divmod(number, repeats)
        model_seed = _seed_of("model", seed, k, repeat)
        settings = {"seed": model_seed, "queries": asked, "examples": digest([members[k]])}
        settings["training"] = training
        compute = partial(_losses, task, train, members[k], queries, model_seed)
        losses.append(_computed_once(folder / f"{k:05d}-{repeat}.json", settings, compute))
    progress("retrain", total, total)
    return torch.tensor(losses, dtype=torch.float64).unflatten(0, (-1, repeats)).mean(1)


def training_digest(train: Train, task: Task) -> str:
    """A hash of the code and the settings of a training function, and of its task and data."""
    try:
        return hash_of((train, task_digest(task)))[:16]
    except TypeError as error:
        raise ValueError(
            f"train cannot be told from another training function: {error}; or give "
            "training='a name of its settings'"
        ) from None


@torch.no_grad()
def _losses(
    task: Task, train: Train, members: Tensor, queries: Sequence[Batch], seed: int
) -> list[float]:
    """Losses of all queries under a model trained on these examples."""
    model = _trained(task, train, members.nonzero()[:, 0], seed)
    device = next(model.parameters()).device
    batches = [tuple(part.to(device) for part in batch) for batch in queries]
    losses = [loss for batch in batches for loss in task.losses(model, batch).tolist()]
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"a retrained model (seed {seed}) has a loss of {loss} on query {number}; train it "
                "with a smaller learning rate"
            )
    return losses


def with_flipped_labels(task: Task, fraction: float, seed: int) -> tuple[Task, Tensor]:
    """The task with a fraction of its training labels replaced by random other ones.

    Also returns which labels differ: [N]
    """
    column = label_column(task)
    if column is None:
        raise ValueError(
            f"task {task.name!r} has no labels to flip: its `logits` must give one integer target "
            "an example, which is one of the tensors of its examples"
        )
    labels = task.train.tensors[column]
    size = round(fraction * len(labels))
    classes, kind = labels.unique(return_inverse=True)
    if not 0 < size < len(labels) or len(classes) < 2:
        raise ValueError(
            f"flipped labels need two classes and a fraction that leaves some of {len(labels)} "
            f"right and some wrong, got {len(classes)} and {fraction}"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[:size]
    shift = torch.randint(1, len(classes), (size,), generator=generator)
    changed = labels.clone()
    changed[chosen] = classes[(kind[chosen] + shift) % len(classes)]
    tensors = (*task.train.tensors[:column], changed, *task.train.tensors[column + 1 :])
    return replace(task, train=Examples(tensors)), changed != labels


def label_column(task: Task) -> int | None:
    """The index of the tensor with the labels, found by comparing with the targets of `logits`."""
    if task.logits is None:
        return None
    batch = task.train.batch(torch.arange(min(8, len(task.train))))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        _, targets = task.logits(task.model(), batch)
    for column, tensor in enumerate(batch):
        if tensor.ndim == 1 and not tensor.is_floating_point() and tensor.equal(targets):
            return column
    return None


def evaluate(
    attributor: "Attributor",
    train: Train,
    queries: int = 20,
    *,
    subsets: int = 20,
    fraction: float = 0.5,
    dims: Sequence[int] = (16, 32, 64),
    flipped: float = 0.1,
    damping: float = 0.1,
    seed: int = 0,
    training: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure how well a run's scores predict retraining, and write the result into its folder.

    Args:
        attributor: a run with a task and a fitted curvature.
        train: (task, indices, seed) → a new model, trained like the one that was scored. Not used
            for an unrolled run: its models are trained again with the same seed and the same
            batches, in which examples outside of the subset have weight 0.
        queries: number of evaluation examples to score.
        subsets: number of random subsets to retrain on. 0 for an unrolled run, whose scores are
            then what gradients and EK-FAC are compared with, at the cost of a few trainings.
        fraction: fraction of the examples in a subset.
        dims: dimensions of stores whose scores are compared with exact ones.
        flipped: fraction of labels to flip; 0 skips this, and so do tasks without labels.
        damping: damping of H, as a multiple of each layer's mean eigenvalue.
        seed: random seed.
        training: identifies the training, so that models of two are not mixed; default: a digest of
            `train` and of what the task trains on.
        progress: called with the stage, the models done and their number.
    """
    a, task, stage = attributor, attributor.task, attributor.folder.stage("fit")
    if task is None or stage is None:
        raise ValueError(
            f"evaluate needs a run on a task with curvature, {a.folder.path} has "
            f"{'no curvature' if task else 'no task'}; give the task, then fit"
        )
    # imported here, since scorers need the measures of this module
    from isokron.attribution.scorers import ExactScorer
    from isokron.attribution.task_run import UnrolledScorer

    if isinstance(a.exact, UnrolledScorer):
        # there is no curvature to project, and no self-influence
        train, dims, flipped = a.exact.retrained, (), 0.0
        run, weights = a.exact.run, a.fingerprints.now().weights
        training = training or hash_of([run.params, run.order, weights])[:16]
    elif not subsets:
        raise ValueError("subsets must be at least 1 for a run that is not unrolled, got 0")
    size = min(task.batch_size, len(a.data))
    examples = Examples(a.data.batch(range(len(a.data))))
    scored = replace(task, train=examples, ids=a.data.ids, lengths=None, batch_size=size)
    training = training or training_digest(train, scored)
    # scores come first, so that errors show up before the hours of retraining
    members = random_subsets(subsets, len(examples), fraction, seed) if subsets else None
    batches = [task.held_out.batch(torch.tensor([number])) for number in range(queries)]
    asked = [Query(batch, (Shown(),), "") for batch in batches]
    gradients_only = ExactScorer(a.subject, lambda damping: None)
    block = a.memory_plan(queries=asked).block
    exact = a.exact.scores(asked, damping, block=block).scores
    gradients = gradients_only.scores(asked, damping, block=block).scores
    scores, agreement = {"gradients": gradients}, {}
    if a.is_unrolled:
        scores["ekfac"] = _ekfac_scores(a, scored, asked, damping, block)
        agreement = {name: _summary(spearman(s, exact)) for name, s in scores.items()}
    scores[stage["method"]] = exact
    by_dim = {
        str(dim): float(spearman(a.projected_scores(asked, dim, damping=damping), exact).mean())
        for dim in dims
    }
    folder = a.folder.path / "evaluation"
    folder.mkdir(exist_ok=True)
    lds = {}
    if members is not None:
        settings: dict[str, Any] = {"seed": seed, "training": training, "progress": progress}
        losses = retrain(folder / "subsets", scored, train, members, batches, **settings)
        lds = {name: _summary(lds_by_query(s, members, losses)) for name, s in scores.items()}
    aucs = None
    # a model trained on flipped labels has no optimizer to take curvature from
    if flipped and "optimizer" not in stage and label_column(scored) is not None:
        settings = {"flipped": flipped, "damping": damping, "seed": seed, "training": training}
        find = partial(_mislabelled, a, scored, train, flipped, damping, seed)
        aucs = _computed_once(folder / "mislabelled.json", settings, find)
    results = {
        **{"format": "isokron evaluation", "version": 5, "fit": stage, "damping": damping},
        **{"seed": seed, "subsets": subsets, "fraction": fraction, "flipped": flipped},
        **{"examples": len(examples), "queries": queries, "same_batches": a.is_unrolled},
        **{"lds": lds, "agreement": agreement, "projected": by_dim, "mislabelled": aucs},
    }
    write_json(folder / "evaluation.json", results)
    return results


def _ekfac_scores(
    a: "Attributor", task: Task, queries: Sequence[Query], damping: float, block: int
) -> Tensor:
    """Scores of a run's model with an EK-FAC that is fitted for them."""
    with TemporaryDirectory() as folder:
        run = type(a)(folder, a.subject.model, task=task, layers=a.patterns).fit("ekfac")
        return run.exact.scores(queries, damping, block=block).scores


def _mislabelled(
    a: "Attributor", task: Task, train: Train, fraction: float, damping: float, seed: int
) -> dict[str, float]:
    """AUCs of self-influence and of losses for a model that was trained on flipped labels."""
    wrong, flipped = with_flipped_labels(task, fraction, _seed_of("flipped", seed))
    everything = torch.arange(len(wrong.train))
    model = _trained(wrong, train, everything, _seed_of("mislabelled", seed))
    with TemporaryDirectory() as folder:
        run = type(a)(folder, model, task=wrong, layers=a.patterns)
        run.fit(**(a.folder.stage("fit") or {}))
        query = Query(wrong.held_out.batch(torch.tensor([0])), (Shown(),), "")
        losses = run.exact.scores([query], damping, block=1).losses
        assert losses is not None
        influence = run.self_influence(damping)
    return {
        "self-influence": mislabel_auc(influence, flipped),
        "loss": mislabel_auc(losses, flipped),
    }


def _computed_once(path: Path, settings: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """The result in a file, which must have the same settings; else it is computed and written."""
    if path.exists():
        record = read_json(path, "delete it, and it is computed again", ["result"])
        result = record.pop("result")
        try:
            check_same(path, "evaluation", record, settings)
        except ValueError as error:
            remove = f"or remove {path.parent}, whose models are then trained again"
            raise ValueError(f"{error}, {remove}") from None
        return result
    result = compute()
    write_json(path, {**settings, "result": result})
    return result


def _summary(values: Tensor) -> dict[str, float]:
    """The mean over queries, and its standard error."""
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": float(values.mean()), "error": error}


def _trained(task: Task, train: Train, examples: Tensor, seed: int) -> nn.Module:
    """A trained model; torch's generator is seeded for it and restored afterwards."""
    # the caller's random numbers must not depend on how many models were read from files
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        model = train(task, examples, seed)
    if not isinstance(model, nn.Module):
        raise TypeError(f"train must return the trained model, got {type(model).__name__}")
    return model.eval()


def _seed_of(*names: str | int) -> int:
    """A seed derived from names: 63 bits of their SHA-256."""
    digest = hashlib.sha256(json.dumps(names).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
