"""The structured optimizers with no argument but a learning rate, on real data."""

from typing import Any

import pytest
import torch

import isokron
from isokron import tasks


def mean_loss(name: str, make: Any, steps: int = 50) -> float:
    """Train on all parameters, without groups, warm-up or schedule; the last ten losses."""
    task = tasks.load(name)
    torch.manual_seed(0)
    model = task.model()
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        picked = torch.randint(len(task.train), (task.batch_size,), generator=generator)
        optimizer.zero_grad()
        loss = task.losses(model, task.train.batch(picked)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("name", ["digits-tiny", "mnist-tiny", "speeches-tiny"])
def test_soap_at_a_rate_of_adamw_trains_as_well_or_better(name: str) -> None:
    yardstick = mean_loss(name, lambda params: torch.optim.AdamW(params, lr=3e-3))
    assert mean_loss(name, lambda params: isokron.SOAP(params, lr=3e-3)) < 1.05 * yardstick


@pytest.mark.parametrize("method", [isokron.SOAP, isokron.Shampoo, isokron.Katie])
@pytest.mark.parametrize("name", ["digits-tiny", "speeches-tiny"])
def test_defaults_train_better_than_adamws(name: str, method: Any) -> None:
    assert mean_loss(name, method) < mean_loss(name, torch.optim.AdamW)
