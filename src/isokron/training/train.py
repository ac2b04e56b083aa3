"""A task's model: made from a seed, and trained a little."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from isokron.race.optimizers import YARDSTICK, resolve
from isokron.race.schedule import batch_order, warmup_cosine
from isokron.tasks import Task
from isokron.training.progress import Silent, Watcher


def make_model(task: Task, seed: int) -> nn.Module:
    """As a race makes it from the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()


def train_(
    model: nn.Module,
    task: Task,
    steps: int,
    lr: float,
    seed: int,
    watcher: Watcher | None = None,
    only: Tensor | None = None,
) -> None:
    """AdamW over the batches and under the schedule that a race would use.

    `only`: numbers of the training examples to train on; None for all.
    """
    watcher = watcher or Silent()
    numbers = torch.arange(len(task.train)) if only is None else only
    size = min(task.batch_size, len(numbers))
    optimizer = resolve(YARDSTICK).build(model, lr)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    model.train()
    watcher.began("training", steps, "step")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what building the optimizer drew must not shift dropout
        batches = batch_order(len(numbers), size, steps, seed)
        for step, indices in enumerate(batches, start=1):
            optimizer.zero_grad()
            loss = task.losses(model, task.train.batch(numbers[indices])).mean()
            loss.backward()
            value = loss.item()
            if not math.isfinite(value):
                raise ValueError(
                    f"training loss became {value} at step {step}; lower --lr, which is {lr:g}"
                )
            optimizer.step()
            schedule.step()
            watcher.advanced(step, f"loss {value:.4g}")
    optimizer.zero_grad()
