"""Labels made wrong on purpose, to see whether they are found again."""

from dataclasses import replace

import torch
from torch import Tensor

from isokron.tasks import Examples, Task


def with_flipped_labels(task: Task, fraction: float, seed: int) -> tuple[Task, Tensor]:
    """The task with a fraction of its training labels changed, and which they are: [N].

    Another of the labels that occur is drawn for each, all as likely. Evaluation keeps its own.
    """
    where = labels_of(task)
    if where is None:
        raise ValueError(
            f"task {task.name!r} has no labels to flip: its `logits` must give one integer target "
            "an example, which is one of the tensors of its examples"
        )
    labels = task.train.tensors[where]
    size = round(fraction * len(labels))
    if not 0 < size < len(labels):
        raise ValueError(
            f"fraction must leave some of {len(labels)} labels right and some wrong, got {fraction}"
        )
    classes, kind = labels.unique(return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"flipped labels need two classes, got only {classes.tolist()}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[:size]
    shift = torch.randint(1, len(classes), (size,), generator=generator)
    changed = labels.clone()
    changed[chosen] = classes[(kind[chosen] + shift) % len(classes)]
    flipped = torch.zeros(len(labels), dtype=torch.bool)
    flipped[chosen] = True
    tensors = (*task.train.tensors[:where], changed, *task.train.tensors[where + 1 :])
    return replace(task, train=Examples(tensors)), flipped


def labels_of(task: Task) -> int | None:
    """Which tensor of the examples is their class, by asking an untrained model for its targets."""
    if task.logits is None:
        return None
    batch = task.train.batch(torch.arange(min(8, len(task.train))))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        _, targets = task.logits(task.model(), batch)
    for k, tensor in enumerate(batch):
        if tensor.ndim == 1 and not tensor.is_floating_point() and tensor.equal(targets):
            return k
    return None
