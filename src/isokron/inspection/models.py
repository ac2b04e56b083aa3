"""The model that is inspected: made from a seed, or given weights."""

from __future__ import annotations

import torch
from torch import nn

from isokron.inspection.plan import Plan
from isokron.tasks import Task
from isokron.training import load_weights_
from isokron.training import make_model as made

EVALUATION_BATCH = 128


def make_model(plan: Plan) -> nn.Module:
    """As a race makes it from the same seed, or with the weights that were given."""
    model = made(plan.task, plan.seed)
    if plan.weights is not None:
        load_weights_(model, plan.weights)
    return model


@torch.no_grad()
def evaluation_loss(model: nn.Module, task: Task) -> float:
    """Mean over the evaluation examples."""
    indices = torch.arange(len(task.evaluation))
    parts = [
        task.losses(model, task.evaluation.batch(part)) for part in indices.split(EVALUATION_BATCH)
    ]
    return torch.cat(parts).double().mean().item()
