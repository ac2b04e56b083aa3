"""An inspection from plan to result."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isokron._version import __version__
from isokron.curvature import Curvature
from isokron.inspection.facts import layer_facts
from isokron.inspection.fitting import fit_curvature
from isokron.inspection.models import evaluation_loss
from isokron.inspection.plan import Plan
from isokron.inspection.results import Inspection
from isokron.race.schedule import digest
from isokron.training import Silent, Watcher, train_


def inspect(
    model: nn.Module, plan: Plan, watcher: Watcher | None = None
) -> tuple[Inspection, Curvature]:
    """Train the model as planned, fit its curvature, and say what it is like."""
    watcher = watcher or Silent()
    with torch.random.fork_rng(devices=[]):
        if plan.steps:
            train_(model, plan.task, plan.steps, plan.lr, plan.seed, watcher)
        fitted = fit_curvature(model, plan, watcher)
        loss = evaluation_loss(model, plan.task)
    parameters = list(model.parameters())
    result = Inspection(
        _settings(model, plan),
        layer_facts(fitted.curvature, plan.damping, fitted.places),
        fitted.terms,
        sum(parameter.nbytes for parameter in parameters),
        loss,
        tuple(fitted.notes),
    )
    return result, fitted.curvature


def _settings(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """All that the result depends on, as JSON."""
    task = plan.task
    return {
        "task": task.name,
        "unit": task.unit,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": plan.weights.name if plan.weights else f"made from seed {plan.seed}",
        "training": f"{plan.steps} steps of AdamW" if plan.steps else "none",
        "learning rate": plan.lr if plan.steps else "none",
        "batch size": task.batch_size,
        "seed": plan.seed,
        "examples": plan.examples,
        "method": plan.method,
        "fisher": plan.fisher,
        "sharing": plan.sharing,
        "layers": list(plan.layers) or "all",
        "damping": plan.damping,
        "terms": "predictions" if task.logits else "examples",
        "weights digest": digest(model.state_dict().values()),
        "torch": torch.__version__,
        "isokron": __version__,
    }
