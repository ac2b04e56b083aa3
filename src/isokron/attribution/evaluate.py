"""How far scores can be trusted: retrained models, wrong labels, and projections against none.

The linear datamodelling score (LDS, Park et al. 2303.14186) of a query is Spearman's ρ, over random
subsets of the training examples, of what scores predict and what a model trained on a subset does:

    ρ( Σ_{t in subset} score(q, t),  −loss_q(subset) )

subsets/00000-0.json  losses of every retrained model, one file each
mislabelled.json      how well self-influence and losses find flipped labels
evaluation.json       the results

Files are written complete: what was killed goes on where it was, and ends with the same bytes.
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
from isokron.attribution.store import differences
from isokron.files import write_atomically
from isokron.tasks import Batch, Examples, Shown, Task

if TYPE_CHECKING:
    from isokron.attribution.attributor import Attributor

# (task, numbers of the training examples to use, seed) → a model trained on them
Train = Callable[[Task, Tensor, int], nn.Module]
# (task, its trained model) → self-influence and losses of all training examples: [N], [N]
SelfInfluence = Callable[[Task, nn.Module], tuple[Tensor, Tensor]]
Progress = Callable[[str, int, int], None]  # stage, done, of how many


@dataclass(frozen=True, eq=False)
class Retrained:
    """members: [K, N], the examples of every subset; losses: [K, Q], float64, of queries under the
    models trained on it, the mean over their seeds."""

    members: Tensor
    losses: Tensor


@dataclass(frozen=True)
class Noise:
    """Of projected scores against exact ones. `spearman`: mean over queries; `standard_error`: of a
    score, one a query; `sample`: examples that were compared."""

    spearman: float
    standard_error: list[float]
    sample: int


def ranks(values: Tensor) -> Tensor:
    """Places in ascending order from 0, the mean of theirs for equals. [..., n], float64"""
    values = values.detach().cpu().double().contiguous()
    if bool(values.isnan().any()):
        raise ValueError("NaN has no rank; look for where the scores or losses come from")
    # equals take the places from `first` to `last`
    ordered = values.sort(-1).values
    first, last = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (first + last - 1).double() / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Correlation of ranks along the last dimension, [..., n] → [...]; 0 where one is constant."""
    if x.shape != y.shape or x.ndim == 0 or x.size(-1) < 2:
        raise ValueError(
            "Spearman's ρ needs two tensors of one shape with at least 2 numbers in a row, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        )
    x, y = (ranks(values) for values in (x, y))
    x, y = (values - values.mean(-1, keepdim=True) for values in (x, y))
    lengths = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(lengths > 0, (x * y).sum(-1) / lengths, 0.0)


def noise(exact: Tensor, projected: Tensor) -> Noise:
    """The noise of projected scores, measured on a sample of examples. [Q, n], [Q, n]"""
    residual = (projected.cpu().double() - exact.cpu().double()).square().mean(1).sqrt()
    return Noise(float(spearman(exact, projected).mean()), residual.tolist(), exact.size(1))


def mislabel_auc(scores: Tensor, flipped: Tensor) -> float:
    """How likely a flipped example has a larger score, such as self-influence or loss, than one
    that is right, half for equals. [n], [n]"""
    wrong, right = int(flipped.sum()), int((~flipped).sum())
    if scores.shape != flipped.shape or scores.ndim != 1 or not wrong or not right:
        raise ValueError(
            f"an AUC needs scores [n] and as many booleans of both kinds, got {list(scores.shape)} "
            f"and {list(flipped.shape)} with {wrong} True and {right} False"
        )
    # Mann–Whitney: the ranks of the flipped, less those they have among themselves
    above = float(ranks(scores)[flipped.cpu()].sum()) - wrong * (wrong - 1) / 2
    return above / (wrong * right)


def lds_by_query(scores: Tensor, retrained: Retrained) -> Tensor:
    """The LDS of scores [Q, N] for every query: [Q]; 0 where nothing differs between subsets."""
    members, losses = retrained.members, retrained.losses
    if scores.shape != (losses.size(1), members.size(1)):
        raise ValueError(
            f"scores must be [queries, examples] = [{losses.size(1)}, {members.size(1)}], as the "
            f"models were asked for, got {tuple(scores.shape)}"
        )
    return spearman(scores.cpu().double() @ members.double().mT, -losses.mT)


def compression(
    exact: Tensor, projected: Callable[[int], Tensor], dims: Sequence[int]
) -> dict[int, float]:
    """Spearman's ρ of projected and exact scores [Q, N], the mean over queries, by dimension."""
    return {dim: float(spearman(projected(dim), exact).mean()) for dim in dims}


def subsets(count: int, examples: int, fraction: float = 0.5, seed: int = 0) -> Tensor:
    """Random subsets [count, examples], each of that fraction."""
    size = round(fraction * examples)
    if count < 1 or not 0 < size < examples:
        raise ValueError(
            "subsets needs a count of at least 1, and a fraction that leaves some of the "
            f"{examples} examples in and some out, got {count} and {fraction}"
        )
    members = torch.zeros(count, examples, dtype=torch.bool)
    # a seed for each, so that a larger count keeps the models that were trained
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
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Retrained:
    """Train models on subsets of the training examples and ask each for the losses of all queries.

    Args:
        folder: of the results; what is there is not computed again, and refused if it is of other
            settings, subsets or queries.
        task: its first N training examples are used.
        train: (task, indices, seed) → trained model.
        members: [K, N], booleans.
        queries: batches of any number of examples each.
        repeats: models of a subset, each with a seed of its own.
        seed: of all models.
        settings: JSON-able, what else decides the numbers.
        progress: told how many models are done, of how many.
    """
    if members.ndim != 2 or members.dtype != torch.bool or members.size(1) > len(task.train):
        raise ValueError(
            f"members must be booleans [subsets, examples], of at most {len(task.train)} examples, "
            f"got {members.dtype} {tuple(members.shape)}"
        )
    if repeats < 1 or not queries:
        raise ValueError(f"give at least 1 repeat and a query, got {repeats} and {len(queries)}")
    folder.mkdir(parents=True, exist_ok=True)
    asked = _digest([tensor for batch in queries for tensor in batch])
    total, losses = len(members) * repeats, []
    for number in range(total):
        progress(number, total)
        k, repeat = divmod(number, repeats)
        head = {**(settings or {}), "subset": k, "seed": _seed_of("model", seed, k, repeat)}
        head |= {"examples": _digest([members[k]]), "queries": asked}
        train_one = partial(_losses, task, train, members[k].nonzero()[:, 0], queries, head)
        losses.append(_computed_once(folder / f"{k:05d}-{repeat}.json", head, train_one))
    progress(total, total)
    by_model = torch.tensor(losses, dtype=torch.float64)
    return Retrained(members, by_model.unflatten(0, (-1, repeats)).mean(1))


@torch.no_grad()
def _losses(
    task: Task, train: Train, examples: Tensor, queries: Sequence[Batch], head: Mapping[str, Any]
) -> list[float]:
    """Of all queries, under a model trained on these examples."""
    model = _trained(task, train, examples, head["seed"])
    device = next(model.parameters()).device
    batches = [tuple(part.to(device) for part in batch) for batch in queries]
    losses = [loss for batch in batches for loss in task.losses(model, batch).tolist()]
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the model of subset {head['subset']} has a loss of {loss} on query {number}; "
                "train it with a smaller learning rate"
            )
    return losses


def with_flipped_labels(task: Task, fraction: float, seed: int) -> tuple[Task, Tensor]:
    """The task with a fraction of its training labels changed, and which they are: [N].

    Another of the labels that occur is drawn for each, all as likely. Evaluation keeps its own.
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
    """Which tensor of the examples is their class, by asking an untrained model for its targets."""
    if task.logits is None:
        return None
    batch = task.train.batch(torch.arange(min(8, len(task.train))))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        _, targets = task.logits(task.model(), batch)
    for column, tensor in enumerate(batch):
        if tensor.ndim == 1 and not tensor.is_floating_point() and tensor.equal(targets):
            return column
    return None


def mislabelled(
    task: Task, train: Train, self_influence: SelfInfluence, fraction: float, seed: int = 0
) -> dict[str, float]:
    """AUCs of self-influence and of losses for a model trained where labels are flipped."""
    wrong, flipped = with_flipped_labels(task, fraction, _seed_of("flipped", seed))
    everything = torch.arange(len(wrong.train))
    model = _trained(wrong, train, everything, _seed_of("mislabelled", seed))
    influence, losses = self_influence(wrong, model)
    return {
        "self-influence": mislabel_auc(influence, flipped),
        "loss": mislabel_auc(losses, flipped),
    }


def evaluate(
    folder: Path,
    task: Task,
    train: Train,
    queries: Sequence[Batch],
    scores: Mapping[str, Tensor],
    *,
    projected: Mapping[str, tuple[str, Callable[[int], Tensor]]] | None = None,
    dims: Sequence[int] = (16, 32, 64),
    self_influence: SelfInfluence | None = None,
    flipped: float = 0.1,
    models: int = 50,
    fraction: float = 0.5,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Measure how far scores can be trusted, and write it into a folder.

    Args:
        folder: of the results; what was finished before a kill is not computed again.
        task: with exactly the training examples that were scored.
        train: (task, indices, seed) → a new model, trained as the one that was scored.
        queries: batches, Q examples in all.
        scores: name of a method → its scores [Q, N] of all training examples.
        projected: name of a projection → name of the exact scores among `scores`, and dim → scores.
        dims: dimensions of projections to compare.
        self_influence: (task, model) → self-influence and losses [N]; None leaves labels alone.
        flipped: part of the labels that is made wrong; 0, and tasks without labels, leave it out.
        models: random subsets to retrain on.
        fraction: part of the examples in a subset.
        seed: of everything random.
        settings: JSON-able, what else decides the numbers.
        progress: told of every stage.
    """
    settings = {**(settings or {}), "data": _digest(task.train.tensors)}
    # what can fail at once comes before the hours of retraining
    members = subsets(models, len(task.train), fraction, seed)
    by_dim = {}
    for name, (method, score) in (projected or {}).items():
        correlations = compression(scores[method], score, dims)
        by_dim[name] = {str(dim): value for dim, value in correlations.items()}
    told = partial(progress, "retrain")
    options: dict[str, Any] = {"seed": seed, "settings": settings, "progress": told}
    outcome = retrain(folder / "subsets", task, train, members, queries, **options)
    lds = {name: _summary(lds_by_query(values, outcome)) for name, values in scores.items()}
    aucs = None
    if flipped and self_influence is not None and label_column(task) is not None:
        head = {**settings, "flipped": flipped, "seed": seed}
        find = partial(mislabelled, task, train, self_influence, flipped, seed)
        aucs = _computed_once(folder / "mislabelled.json", head, find)
    results = {
        **{"format": "isokron evaluation", "version": 2, **settings, "seed": seed},
        **{"subsets": models, "fraction": fraction, "flipped": flipped},
        **{"examples": len(task.train), "queries": outcome.losses.size(1)},
        **{"lds": lds, "compression": by_dim, "mislabelled": aucs},
    }
    content = json.dumps(results, indent=1, ensure_ascii=False).encode()
    write_atomically(folder / "evaluation.json", [content, b"\n"])
    return results


def _computed_once(path: Path, head: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """A result from its file, which must be of the same settings, or computed and written."""
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
        result = record.pop("result")
        if lines := differences(record, json.loads(json.dumps(head))):
            wrong = f"is of another evaluation: {'; '.join(lines)}"
            raise ValueError(f"{path} {wrong}; use the same settings or a new folder")
        return result
    result = compute()
    write_atomically(path, [json.dumps({**head, "result": result}, indent=1).encode(), b"\n"])
    return result


def evaluate_run(
    attributor: "Attributor", train: Train, queries: int, *, damping: float = 0.1, **options: Any
) -> dict[str, Any]:
    """`evaluate` of a run on a task: its scores of the first evaluation examples, beside those of
    gradients alone, projected scores and self-influence. options: those of `evaluate`."""
    a, task, stage = attributor, attributor.task, attributor.folder.stage("fit")
    assert task is not None
    if stage is None:
        raise ValueError(f"{a.folder.path} has no curvature; run: isokron fit {a.folder.path}")
    batches = [task.held_out.batch(torch.tensor([number])) for number in range(queries)]
    asked = [Query(batch, (Shown(),), "") for batch in batches]
    plain = replace(a.exact, inverse=lambda damping: None)
    method = stage["method"]
    scores = {
        "gradients": plain.scores(asked, damping, block=queries).scores,
        method: a.exact.scores(asked, damping, block=queries).scores,
    }

    def self_influence(task: Task, model: nn.Module) -> tuple[Tensor, Tensor]:
        with TemporaryDirectory() as folder:
            other = type(a)(folder, model, task=task, layers=a.patterns).fit(**stage)
            losses = other.exact.scores(asked[:1], damping, block=1).losses
            assert losses is not None
            return other.self_influence(damping), losses

    examples = Examples(a.data.batch(range(len(a.data))))
    size = min(task.batch_size, len(examples))
    scored = replace(task, train=examples, ids=a.data.ids, lengths=None, batch_size=size)
    projected = {"whitened": (method, partial(a.projected_scores, asked, damping=damping))}
    return evaluate(
        a.folder.path / "evaluation",
        scored,
        train,
        batches,
        scores,
        projected={} if method == "ekfac" else projected,
        self_influence=self_influence,
        settings={"damping": damping, "fit": stage},
        **options,
    )


def _summary(values: Tensor) -> dict[str, float]:
    """The mean over queries, and its standard error."""
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": float(values.mean()), "error": error}


def _trained(task: Task, train: Train, examples: Tensor, seed: int) -> nn.Module:
    """What `train` gives, with torch's own generator seeded too, and left as it was."""
    # the caller's random numbers must not depend on which models were in their files already
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        model = train(task, examples, seed)
    if not isinstance(model, nn.Module):
        raise TypeError(f"train must return the trained model, got {type(model).__name__}")
    return model.eval()


def _seed_of(*names: str | int) -> int:
    """A seed for a thing of this name, unlike any other's: 63 bits of SHA-256."""
    digest = hashlib.sha256(json.dumps(names).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
