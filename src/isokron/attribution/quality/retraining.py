"""What really happens without some examples: models trained on random subsets, and what they lose.

Every model's losses are a file of their own, written whole when it is trained, so that what was
killed goes on where it was, and ends with the same bytes.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.run import check_same
from isokron.files import write_atomically
from isokron.tasks import Batch, Task

# (task, numbers of the training examples to use, seed) → a model trained on them
Train = Callable[[Task, Tensor, int], nn.Module]


@dataclass(frozen=True, eq=False)
class Retrained:
    """members: [K, N], the examples of every subset; losses: [K, Q], float64, of queries under the
    models trained on it, the mean over their seeds."""

    members: Tensor
    losses: Tensor


def subsets(count: int, examples: int, fraction: float = 0.5, seed: int = 0) -> Tensor:
    """Random subsets [count, examples], each of that fraction. More of them begin with the same."""
    size = round(fraction * examples)
    if count < 1 or not 0 < size < examples:
        raise ValueError(
            "subsets needs a count of at least 1, and a fraction that leaves some of the "
            f"{examples} examples in and some out, got {count} and {fraction}"
        )
    found = torch.zeros(count, examples, dtype=torch.bool)
    for k in range(count):
        generator = torch.Generator().manual_seed(seed_of("subset", seed, k))
        found[k, torch.randperm(examples, generator=generator)[:size]] = True
    return found


def seed_of(*names: str | int) -> int:
    """A seed for a thing of this name, unlike any other's: 63 bits of SHA-256."""
    digest = hashlib.sha256(json.dumps(names).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


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
    """Train models on subsets [K, N] of the task's first N training examples, and ask each for the
    losses of all queries.

    `repeats`: models of a subset, each with a seed of its own. `settings`: JSON-able, what else
    decides the numbers. What is in `folder` already is not done again, and refused if it was done
    with other settings, subsets or queries.
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
    for k, member in enumerate(members):
        own = []
        for repeat in range(repeats):
            progress(k * repeats + repeat, total)
            head = {
                **(settings or {}),
                "subset": k,
                "repeat": repeat,
                "seed": seed_of("model", seed, k, repeat),
                "examples": _digest([member]),
                "queries": asked,
            }
            own.append(
                _losses(folder / f"{k:05d}-{repeat}.json", head, task, train, member, queries)
            )
        losses.append(torch.stack(own).mean(0))
    progress(total, total)
    return Retrained(members, torch.stack(losses))


def _losses(
    path: Path,
    head: Mapping[str, Any],
    task: Task,
    train: Train,
    member: Tensor,
    queries: Sequence[Batch],
) -> Tensor:
    """Of one model, from its file or by training it: [Q]."""
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
        there = torch.tensor(record.pop("losses"), dtype=torch.float64)
        check_same(path, "model", record, head)
        return there
    model = trained(task, train, member.nonzero()[:, 0], head["seed"])
    found = losses_of(task, model, queries).tolist()
    for number, loss in enumerate(found):
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the model of subset {head['subset']} has a loss of {loss} on query {number}; "
                "train it with a smaller learning rate"
            )
    content = json.dumps({**head, "losses": found}, indent=1)
    write_atomically(path, [content.encode(), b"\n"])
    return torch.tensor(found, dtype=torch.float64)


def trained(task: Task, train: Train, examples: Tensor, seed: int) -> nn.Module:
    """What `train` gives, with torch's own generator seeded too, and left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = train(task, examples, seed)
    if not isinstance(model, nn.Module):
        raise TypeError(f"train must return the trained model, got {type(model).__name__}")
    return model.eval()


@torch.no_grad()
def losses_of(task: Task, model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Of every example of all batches, float64."""
    return torch.cat([task.losses(model, batch).double().cpu() for batch in batches])


def _digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
