"""A gradient whose square overflows: its second moment, and so its step, would stay so for good."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isokron
from cases import DEVICE, MAKERS, equal, loss_of, net, train

# Quad and Skew step everything themselves, and without squares
SQUARING = {name: make for name, make in MAKERS.items() if name not in ("quad", "skew-delayed")}
every_maker = pytest.mark.parametrize("make", SQUARING.values(), ids=SQUARING)


def after_a_huge_gradient(
    make: Callable[[nn.Module], Any], nonfinite: str, size: float = 1e20
) -> tuple[nn.Module, Any, nn.Module, dict[str, Any]]:
    """A model with a huge gradient of what AdamW steps; a copy of it, and the optimizer's state."""
    model = net()
    optimizer = make(model)
    for group in optimizer.param_groups:
        group["nonfinite"] = nonfinite
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    model.scale.grad.fill_(size)
    return model, optimizer, copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())


def same_state(optimizer: Any, before: dict[str, Any]) -> bool:
    return all(
        torch.equal(value, before["state"][number][key])
        for number, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    )


@every_maker
def test_a_gradient_whose_square_overflows_is_refused_with_its_name_and_value(
    make: Callable[[nn.Module], Any],
) -> None:
    model, optimizer, before, state = after_a_huge_gradient(make, "raise")
    rule = r"too large to be squared, of parameter .* \(1e\+20\); nothing was changed"
    with pytest.raises(FloatingPointError, match=rule):
        optimizer.step()
    assert equal(model, before)
    assert same_state(optimizer, state)
    train(model, optimizer, range(3, 6))
    assert not torch.equal(model.scale, before.scale)


@every_maker
def test_a_step_with_a_gradient_whose_square_overflows_is_skipped(
    make: Callable[[nn.Module], Any],
) -> None:
    model, optimizer, before, state = after_a_huge_gradient(make, "skip")
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert equal(model, before)
    assert same_state(optimizer, state)


@pytest.mark.parametrize("graft", [None, "sgd"])
@pytest.mark.parametrize("name", ["Muon", "Quad", "Skew"])
def test_methods_without_squares_take_gradients_of_any_size(name: str, graft: str | None) -> None:
    param = nn.Parameter(torch.zeros(8, 8, device=DEVICE))
    groups = [{"params": [param], "route": "method", "graft": graft}]
    optimizer = getattr(isokron, name)(groups, lr=1e-2)
    param.grad = torch.eye(8, device=DEVICE) * 1e25
    optimizer.step()
    assert bool(param.isfinite().all())
    assert float(param[0, 0].detach()) < 0


@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_moments_in_float16_take_what_can_be_squared_in_float16(state_dtype: Any) -> None:
    param = nn.Parameter(torch.zeros(64, dtype=torch.float16, device=DEVICE))
    settings = {"nonfinite": "raise", "state_dtype": state_dtype}
    optimizer = isokron.AdamW([("w", param)], lr=1e-2, **settings)
    param.grad = torch.full_like(param, 200.0)  # of norm 1600
    optimizer.step()
    param.grad = torch.full_like(param, 300.0)
    if state_dtype is None:
        with pytest.raises(FloatingPointError, match=r"squared, of parameter 'w' \(300\)"):
            optimizer.step()
    else:
        optimizer.step()
        assert float(optimizer.state[param]["exp_avg_sq"][0]) > 0
