"""AdamW with small tensors in one buffer: the same bits, and nobody notices."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import isokron

SHAPES = [(64,), (32, 4), (5,), (96,), (300, 300), (4, 8, 2)]
MOVED = [0, 1, 3, 5]  # those without an end of their own, and not large


def params_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def backward(params: list[nn.Parameter], step: int, skip: int | None = None) -> None:
    """Gradients by autograd, as a model makes them: added to what is there."""
    generator = torch.Generator().manual_seed(1000 + step)
    weights = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
    pairs = [(p, w) for i, (p, w) in enumerate(zip(params, weights, strict=True)) if i != skip]
    sum((p * w).sum() for p, w in pairs).backward()


def run(
    optimizer: torch.optim.Optimizer,
    params: list[nn.Parameter],
    steps: range,
    disturb: Callable[[int, list[nn.Parameter]], None] = lambda step, params: None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        disturb(step, params)
        backward(params, step)
        optimizer.step()


def in_buffer(params: list[nn.Parameter]) -> list[int]:
    addresses = [p.untyped_storage().data_ptr() for p in params]
    return [i for i, address in enumerate(addresses) if addresses.count(address) > 1]


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"betas": (0.3, 0.5)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_bits_are_those_of_torch(dtype: torch.dtype, settings: dict[str, object]) -> None:
    mine, theirs = params_of(dtype), params_of(dtype)
    run(isokron.AdamW(mine, flat=True, **settings), mine, range(6))
    run(torch.optim.AdamW(theirs, fused=True, **settings), theirs, range(6))
    assert all(map(torch.equal, mine, theirs))
    assert in_buffer(mine) == MOVED


def test_gradients_stay_views_of_one_tensor() -> None:
    params = params_of()
    optimizer = isokron.AdamW(params, flat=True)
    run(optimizer, params, range(2))
    kept = [params[i].grad for i in MOVED]
    assert len({grad.untyped_storage().data_ptr() for grad in kept}) == 1
    optimizer.zero_grad()
    assert all(
        params[i].grad is grad and not grad.any() for i, grad in zip(MOVED, kept, strict=True)
    )
    assert params[2].grad is None  # what is not in the buffer is as it ever was
    backward(params, 2)
    assert all(params[i].grad is grad for i, grad in zip(MOVED, kept, strict=True))


def set_to_none(step: int, params: list[nn.Parameter]) -> None:
    if step == 3:
        for param in params:
            param.grad = None


def replace_data(step: int, params: list[nn.Parameter]) -> None:
    if step == 3:
        params[1].data = params[1].data.clone()


def replace_by_transposed(step: int, params: list[nn.Parameter]) -> None:
    params[1].grad = torch.ones(4, 32).mT


@pytest.mark.parametrize("disturb", [set_to_none, replace_data, replace_by_transposed])
def test_what_others_do_to_parameters_and_gradients_is_followed(
    disturb: Callable[[int, list[nn.Parameter]], None],
) -> None:
    mine, theirs = params_of(), params_of()
    run(isokron.AdamW(mine, flat=True), mine, range(6), disturb)

    def same_start(step: int, params: list[nn.Parameter]) -> None:
        disturb(step, params)
        for param in params:
            if param.grad is not None:
                param.grad = param.grad.contiguous()  # torch's kernel ignores strides

    run(torch.optim.AdamW(theirs, fused=True), theirs, range(6), same_start)
    assert all(map(torch.equal, mine, theirs))


def test_a_missing_gradient_leaves_its_parameter_alone() -> None:
    mine, theirs = params_of(), params_of()
    ours = isokron.AdamW(mine, flat=True)
    reference = torch.optim.AdamW(theirs, fused=True)
    for step in range(6):
        for params, optimizer in ((mine, ours), (theirs, reference)):
            for param in params:
                param.grad = None
            backward(params, step, skip=1 if step == 2 else None)
            optimizer.step()
    assert all(map(torch.equal, mine, theirs))
    assert ours.state[mine[1]]["step"] == 5
    assert ours.state[mine[0]]["step"] == 6


def test_resume_is_bit_exact_with_and_without_a_buffer() -> None:
    straight = params_of()
    run(isokron.AdamW(straight, flat=True), straight, range(8))
    for before, after in ((True, True), (True, False), (False, True)):
        params = params_of()
        optimizer = isokron.AdamW(params, flat=before)
        run(optimizer, params, range(4))
        saved = copy.deepcopy(optimizer.state_dict())
        resumed = [nn.Parameter(p.detach().clone()) for p in params]
        again = isokron.AdamW(resumed, flat=after)
        again.load_state_dict(saved)
        for group in again.param_groups:
            group["flat"] = after
        run(again, resumed, range(4, 8))
        assert all(map(torch.equal, straight, resumed))


def test_loading_into_a_running_optimizer_takes_its_buffer_up_again() -> None:
    params, reference = params_of(), params_of()
    optimizer = isokron.AdamW(params, flat=True)
    run(optimizer, params, range(3))
    address = params[0].data_ptr()
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, params, range(3, 6))
    assert params[0].data_ptr() == address
    run(isokron.AdamW(reference), reference, range(6))
    assert all(map(torch.equal, params, reference))


def test_parameters_that_share_memory_are_left_where_they_are() -> None:
    base = torch.randn(4, 64)
    views = [nn.Parameter(row) for row in base]  # somebody else's buffer
    tied = nn.Parameter(torch.randn(64))
    twin = nn.Parameter(tied.detach())
    params = [*views, tied, twin]
    before = [p.data_ptr() for p in params]
    optimizer = isokron.AdamW(params, flat=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [p.data_ptr() for p in params] == before


def test_other_optimizers_keep_their_vectors_in_a_buffer_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))
    twin = copy.deepcopy(model)
    x = torch.randn(8, 32)
    flat = isokron.SOAP(model.parameters(), flat=True)
    plain = isokron.SOAP(twin.parameters())
    for net, optimizer in ((model, flat), (twin, plain)):
        for _ in range(5):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert in_buffer(list(model.parameters())) == [1, 2, 3, 5]


def test_flat_must_be_true_or_false() -> None:
    with pytest.raises(ValueError, match="flat"):
        isokron.AdamW(params_of(), flat="yes")


def two_layers(flat: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    return model, isokron.AdamW(model.parameters(), lr=0.1, flat=flat)


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        model(x.to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()


def test_a_frozen_parameter_stays_where_it_is() -> None:
    ends = []
    for flat in (True, False):
        model, optimizer = two_layers(flat)
        train_on(model, optimizer, 3)
        model[0].weight.requires_grad_(False)
        train_on(model, optimizer, 3)
        ends.append(list(model.parameters()))
    assert all(map(torch.equal, *ends))


def test_a_model_that_changes_its_dtype_and_back_is_followed() -> None:
    ends = []
    for flat in (True, False):
        model, optimizer = two_layers(flat)
        train_on(model, optimizer, 2)
        model.double()
        optimizer.zero_grad()
        assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
        model.float()
        train_on(model, optimizer, 2)
        ends.append(list(model.parameters()))
    assert all(map(torch.equal, *ends))


def test_gradients_whose_data_is_replaced_or_that_change_places_are_followed() -> None:
    ends = []
    for flat in (True, False):
        params = [nn.Parameter(torch.ones(64)), nn.Parameter(-torch.ones(64))]
        optimizer = isokron.AdamW(params, lr=0.1, flat=flat)
        for step in range(4):
            optimizer.zero_grad()
            sum((p * (i + step + 1)).square().sum() for i, p in enumerate(params)).backward()
            if step == 1:
                for param in params:
                    param.grad.data = param.grad.data.clamp(-0.1, 0.1)
            if step == 2:
                params[0].grad, params[1].grad = params[1].grad, params[0].grad
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(map(torch.equal, *ends))


def test_a_parameter_turned_round_in_place_is_followed() -> None:
    ends = []
    for flat in (True, False):
        model, optimizer = two_layers(flat)
        train_on(model, optimizer, 2)
        model[0].weight.data = model[0].weight.data.t()
        train_on(model, optimizer, 2)
        ends.append(list(model.parameters()))
    assert all(map(torch.equal, *ends))


def test_memory_that_somebody_else_has_hold_of_is_not_left() -> None:
    one, other, third = (nn.Parameter(torch.randn(64)) for _ in range(3))
    twin, view = nn.Parameter(one.data), other.data
    shared = nn.Parameter(torch.randn(64).share_memory_())
    optimizer = isokron.AdamW(
        [{"params": [one, other, third, shared]}, {"params": [twin]}], flat=True
    )
    for param in (one, other, third, shared, twin):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(one, twin)
    assert torch.equal(other, view)
    assert shared.is_shared()
