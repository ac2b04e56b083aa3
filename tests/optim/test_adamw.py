"""Bit equality with torch's fused AdamW, and its checkpoints."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import isokron
from cases import equal, net, train

SETTINGS = [
    {},
    {"amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.0},
    {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3},
    {"betas": (0.2, 0.4)},
    {"betas": (0.0, 0.0)},
]


Params = list[nn.Parameter]


def pair(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> tuple[Params, ...]:
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    return tuple([nn.Parameter(value.clone()) for value in values] for _ in range(2))


def step_both(
    mine: Params,
    theirs: Params,
    ours: torch.optim.Optimizer,
    reference: torch.optim.Optimizer,
    steps: int = 8,
    absent: Callable[[int, int], bool] = lambda step, i: False,
) -> None:
    """Steps along the same random gradients; `absent`: in which step which parameter has none."""
    for step in range(steps):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            a.grad = None if absent(step, i) else torch.randn_like(a)
            b.grad = None if a.grad is None else a.grad.clone()
        ours.step()
        reference.step()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equal_to_torch_fused_bit_for_bit(settings: dict[str, object], dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(n,) for n in range(1, 34)] + [(7, 9), (64, 33), (), (2, 3, 5)]
    mine, theirs = pair(shapes, dtype)
    ours = isokron.AdamW(mine, **settings)
    step_both(mine, theirs, ours, torch.optim.AdamW(theirs, fused=True, **settings))
    assert all(map(torch.equal, mine, theirs))


def test_torchs_default_differs_by_rounding_only() -> None:
    """A loop of operations rounds between them; the fused operator does not."""
    mine, theirs = pair([(64, 33), (7,)])
    step_both(mine, theirs, isokron.AdamW(mine), torch.optim.AdamW(theirs))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_torchs_arguments_are_accepted_in_torchs_order() -> None:
    mine, theirs = pair([(7, 9), (5,)])
    positional = (1e-2, (0.8, 0.95), 1e-6, 0.2, True)
    ours = isokron.AdamW(mine, *positional, fused=True, foreach=False, capturable=False)
    step_both(mine, theirs, ours, torch.optim.AdamW(theirs, *positional, fused=True))
    assert all(map(torch.equal, mine, theirs))
    for name in ("capturable", "differentiable"):
        with pytest.raises(ValueError, match=f"AdamW: {name} must be False, got {name}=True"):
            isokron.AdamW(mine, **{name: True})


def test_equal_to_torch_where_gradients_come_and_go() -> None:
    mine, theirs = pair([(5,), (6, 4), (3,)])
    ours, reference = isokron.AdamW(mine), torch.optim.AdamW(theirs, fused=True)
    step_both(mine, theirs, ours, reference, 9, absent=lambda step, i: (step + i) % 3 == 0)
    assert all(map(torch.equal, mine, theirs))
    assert [ours.state[p]["step"] for p in mine] == [reference.state[p]["step"] for p in theirs]


def test_channels_last_is_equal_bit_for_bit() -> None:
    weight = torch.randn(6, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    mine, theirs = [nn.Parameter(weight.clone())], [nn.Parameter(weight.clone())]
    step_both(mine, theirs, isokron.AdamW(mine), torch.optim.AdamW(theirs, fused=True))
    assert torch.equal(mine[0], theirs[0])


def test_l2_decay_is_adam_with_weight_decay() -> None:
    mine, theirs = pair([(5,), (6, 4)], torch.float64)
    ours = isokron.AdamW(mine, decay="l2", weight_decay=0.3)
    step_both(mine, theirs, ours, torch.optim.Adam(theirs, weight_decay=0.3))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_checkpoints_interchange_with_torch(amsgrad: bool) -> None:
    model = net()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=amsgrad, fused=True)
    train(model, theirs, range(3))
    twin = copy.deepcopy(model)
    ours = isokron.AdamW(twin.parameters(), lr=1e-2, amsgrad=amsgrad)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(model, theirs, range(3, 6))
    train(twin, ours, range(3, 6))
    assert equal(model, twin)
    back = torch.optim.AdamW(twin.parameters(), lr=1e-2, amsgrad=amsgrad, fused=True)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(model, theirs, range(6, 9))
    train(twin, back, range(6, 9))
    assert equal(model, twin)


def test_float32_moments_of_half_precision_parameters_are_by_option() -> None:
    """One rounding a step, of the parameter: compare with float32 AdamW rounded each step."""
    start = torch.randn(40)
    half = nn.Parameter(start.bfloat16())
    full = nn.Parameter(half.detach().float())
    ours = isokron.AdamW([half], lr=0.1, state_dtype=torch.float32)
    reference = torch.optim.AdamW([full], lr=0.1, fused=True)
    for _ in range(5):
        half.grad = torch.randn(40).bfloat16()
        full.grad = half.grad.float()
        ours.step()
        reference.step()
        with torch.no_grad():
            full.copy_(full.bfloat16())
    assert torch.equal(half.float(), full)
    assert ours.state[half]["exp_avg"].dtype is torch.float32


def test_parameters_that_join_late_count_their_own_steps() -> None:
    mine, theirs = pair([(3,), (4,), (5,)])
    for param in mine[1:]:
        param.requires_grad_(False)
    ours, reference = isokron.AdamW(mine), torch.optim.AdamW(theirs, fused=True)
    step_both(mine, theirs, ours, reference, 2, absent=lambda step, i: i > 0)
    for param in mine[1:]:
        param.requires_grad_(True)
    step_both(mine, theirs, ours, reference, 4)
    assert [ours.state[p]["step"].item() for p in mine] == [6, 4, 4]
    assert all(map(torch.equal, mine, theirs))


def test_a_checkpoint_with_state_for_some_parameters_counts_right() -> None:
    mine, theirs = pair([(3,), (4,), (5,)])
    ours, reference = isokron.AdamW(mine), torch.optim.AdamW(theirs, fused=True)
    theirs[2].grad = torch.randn(5)
    reference.step()
    with torch.no_grad():
        mine[2].copy_(theirs[2])
    ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    step_both(mine, theirs, ours, reference)
    assert all(map(torch.equal, mine, theirs))


def test_a_layout_that_changes_during_training_is_followed() -> None:
    weight = torch.randn(6, 4)
    a, b = nn.Parameter(weight.clone().T), nn.Parameter(weight.clone().T.contiguous())
    ours, reference = isokron.AdamW([a], lr=0.1), torch.optim.AdamW([b], lr=0.1)
    for step in range(6):
        if step == 3:
            a.grad = None
            a.data = a.data.contiguous()
        a.grad = torch.randn(4, 6)
        b.grad = a.grad.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_settings_that_a_checkpoint_of_torch_lacks_are_kept() -> None:
    params, others = pair([(3,)], torch.bfloat16)
    reference = torch.optim.AdamW(others, lr=0.5)
    others[0].grad = torch.ones_like(others[0])
    reference.step()
    ours = isokron.AdamW([{"params": params, "lr_scale": 0.1}], state_dtype=torch.float32)
    ours.load_state_dict(reference.state_dict())
    group = ours.param_groups[0]
    assert (group["lr"], group["lr_scale"], group["state_dtype"]) == (0.5, 0.1, torch.float32)
