"""The model that is inspected: made from a seed, given weights, trained a little."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from isokron.inspection.plan import Plan
from isokron.inspection.progress import Watcher
from isokron.inspection.weights import load_weights_
from isokron.race.optimizers import YARDSTICK, resolve
from isokron.race.schedule import batch_order, warmup_cosine
from isokron.tasks import Task

EVALUATION_BATCH = 128


def make_model(plan: Plan) -> nn.Module:
    """As a race makes it from the same seed, or with the weights that were given."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        model = plan.task.model()
    if plan.weights is not None:
        load_weights_(model, plan.weights)
    return model


def train_(model: nn.Module, plan: Plan, watcher: Watcher) -> None:
    """AdamW over the batches and under the schedule that a race would use."""
    task = plan.task
    optimizer = resolve(YARDSTICK).build(model, plan.lr)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, plan.steps))
    torch.manual_seed(plan.seed)  # what building the optimizer drew must not shift dropout
    model.train()
    watcher.began("training", plan.steps, "step")
    for step, indices in enumerate(
        batch_order(len(task.train), task.batch_size, plan.steps, plan.seed), start=1
    ):
        optimizer.zero_grad()
        loss = task.losses(model, task.train.batch(indices)).mean()
        loss.backward()
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(
                f"training loss became {value} at step {step}; lower --lr, which is {plan.lr:g}"
            )
        optimizer.step()
        schedule.step()
        watcher.advanced(step, f"loss {value:.4g}")
    optimizer.zero_grad()


@torch.no_grad()
def evaluation_loss(model: nn.Module, task: Task) -> float:
    """Mean over the evaluation examples."""
    indices = torch.arange(len(task.evaluation))
    parts = [
        task.losses(model, task.evaluation.batch(part)) for part in indices.split(EVALUATION_BATCH)
    ]
    return torch.cat(parts).double().mean().item()
