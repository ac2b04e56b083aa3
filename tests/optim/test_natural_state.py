"""NaturalGradient: changes of its state are refused, and a failed load changes nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import isokron


def made() -> tuple[nn.Module, isokron.NaturalGradient]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    return model, isokron.NaturalGradient(model, every=2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for seed in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        (model(x) - x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("number", [0, 2, 4])
def test_entries_that_are_deleted_or_replaced_are_refused(number: int) -> None:
    model, optimizer = made()
    train(model, optimizer, range(2))
    param = list(model.parameters())[number]
    entry = optimizer.state.pop(param)
    with pytest.raises(RuntimeError, match="cannot be deleted or replaced"):
        train(model, optimizer, range(2, 3))
    optimizer.state[param] = entry
    train(model, optimizer, range(2, 3))
    entry = optimizer.state[param]
    entry["step"] = entry["step"].clone()
    with pytest.raises(RuntimeError, match="cannot be deleted or replaced"):
        train(model, optimizer, range(3, 4))


@pytest.mark.parametrize(
    ("name", "value"), [("damping", -1.0), ("momentum", 1.5), ("every", 0), ("lr", -0.1)]
)
def test_a_setting_that_is_assigned_later_is_checked(name: str, value: Any) -> None:
    model, optimizer = made()
    train(model, optimizer, range(2))
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"NaturalGradient: {name} must be"):
        train(model, optimizer, range(2, 3))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("key", [2, 4])
def test_a_failed_load_leaves_the_optimizer_as_it_was(key: int) -> None:
    """Parameters 0, 1, 2 and 3 are of layers, 4 and 5 are AdamW's."""
    model, optimizer = made()
    twin, reference = made()
    train(model, optimizer, range(3))
    train(twin, reference, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for value in entry.values():
            value.mul_(2)
    name = "exp_avg" if key == 4 else "output"
    state["state"][key][name] = torch.zeros(3)
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict(state)
    train(model, optimizer, range(3, 6))
    train(twin, reference, range(3, 6))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
