"""Parameters that are loaded, edited, converted or replaced between two steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isokron
from cases import DEVICE, MAKERS, Net, equal, net, randn, train

every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
averaged = pytest.mark.parametrize(
    "kind", [(name, kind) for name in ("AdamW", "SOAP") for kind in ("schedule_free", "primal")]
)


def averaging(kind: tuple[str, str], dtype: torch.dtype = torch.float32) -> tuple[Net, Any]:
    name, average = kind
    model = net(dtype=dtype)
    settings = {"lr": 1e-2, "weight_decay": 0.0, "average": average}
    optimizer = getattr(isokron, name)(model.parameters(), **settings)
    train(model, optimizer, range(7), dtype)
    return model, optimizer


@averaged
def test_weights_loaded_between_averaged_steps_are_where_the_next_begins(kind: Any) -> None:
    """All that is averaged moves with them: the same steps are made, from another place."""
    model, optimizer = averaging(kind)
    reference, plain = copy.deepcopy((model, optimizer))
    other = net(seed=1)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    moved = [q.detach() - p.detach() for p, q in pairs]
    model.load_state_dict(other.state_dict())
    for _ in range(3):
        for params in (model.parameters(), reference.parameters()):
            torch.manual_seed(0)
            for param in params:
                param.grad = randn(*param.shape)
        optimizer.step()
        plain.step()
    for mode in ("train", "eval"):
        getattr(optimizer, mode)()
        getattr(plain, mode)()
        for p, q, by in zip(model.parameters(), reference.parameters(), moved, strict=True):
            torch.testing.assert_close(p.detach(), q + by, rtol=1e-5, atol=1e-5)


@averaged
def test_weights_loaded_while_parameters_are_averages_are_the_average(kind: Any) -> None:
    model, optimizer = averaging(kind)
    optimizer.eval()
    other = net(seed=1)
    model.load_state_dict(other.state_dict())
    optimizer.train()
    assert not equal(model, other)
    optimizer.eval()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@averaged
def test_half_precision_weights_that_nobody_moved_stay_to_the_bit(kind: Any) -> None:
    _, optimizer = averaging(kind, torch.bfloat16)
    average = copy.deepcopy(optimizer.state_dict())["state"][0]["average"]
    optimizer.eval()
    optimizer.train()
    assert torch.equal(optimizer.state_dict()["state"][0]["average"], average)


@averaged
def test_another_average_beta_is_no_edit_of_the_weights(kind: Any) -> None:
    _, optimizer = averaging(kind)
    before = copy.deepcopy(optimizer.state_dict())["state"]
    for group in optimizer.param_groups:
        group["average_beta"] = 0.5
    optimizer.eval()
    for number, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["average"], before[number]["average"])


@every_maker
def test_a_model_in_float64_after_the_first_steps_goes_on_in_float64(
    make: Callable[[nn.Module], Any],
) -> None:
    """As an optimizer made for it that has loaded the state."""
    model = net()
    optimizer = make(model)
    train(model, optimizer, range(4))
    model.double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1e-12)
    twin = copy.deepcopy(model)
    loaded = make(twin)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(4, 9), torch.float64)
    train(twin, loaded, range(4, 9), torch.float64)
    assert equal(model, twin)
    assert all(bool((p.float().double() != p).any()) for p in model.parameters())


@every_maker
@pytest.mark.parametrize("shape", [(12, 6), (16, 16)], ids=["transposed", "larger"])
def test_a_parameter_of_another_shape_is_refused_by_name(
    make: Callable[[nn.Module], Any], shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6, bias=False)).to(DEVICE)
    optimizer = make(model)
    model(randn(4, 12)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state_dict()  # reads what refreshes have done
    model[0].weight.data = randn(*shape)
    weight, state = copy.deepcopy((model[0].weight, dict(optimizer.state[model[0].weight])))
    model(randn(4, shape[1])).square().sum().backward()
    with pytest.raises(
        ValueError, match=r"must keep its shape.* for \(6, 12\); make the optimizer"
    ):
        optimizer.step()
    assert torch.equal(model[0].weight, weight)
    after = optimizer.state[model[0].weight]
    assert all(torch.equal(after[key], value) for key, value in state.items())
