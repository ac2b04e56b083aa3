"""AdamW with small tensors in one buffer: the same bits as without."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import isokron
from cases import build

SHAPES = [(64,), (32, 4), (5,), (96,), (300, 300), (4, 8, 2)]
MOVED = [0, 1, 3, 5]  # the small ones whose length is a multiple of 32


def params_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def backward(params: list[nn.Parameter], step: int, skip: int | None = None) -> None:
    """Let autograd add to the gradients, as a model does."""
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
    grads = [params[i].grad for i in MOVED]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    optimizer.zero_grad()
    assert all(
        params[i].grad is grad and not grad.any() for i, grad in zip(MOVED, grads, strict=True)
    )
    assert params[2].grad is None  # it is not in the buffer
    backward(params, 2)
    assert all(params[i].grad is grad for i, grad in zip(MOVED, grads, strict=True))


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


def test_other_optimizers_keep_their_vectors_in_a_buffer_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))
    twin = copy.deepcopy(model)
    x = torch.randn(8, 32)
    flat = build(isokron.SOAP, model.parameters(), flat=True)
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


def freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def to_double_and_back(model: nn.Sequential) -> None:
    model.double()
    model.float()


def transpose_in_place(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data.t()


@pytest.mark.parametrize("change", [freeze, to_double_and_back, transpose_in_place])
def test_changes_of_the_model_are_followed(change: Callable[[nn.Sequential], None]) -> None:
    ends = []
    for flat in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        optimizer = isokron.AdamW(model.parameters(), lr=0.1, flat=flat)
        for step in range(6):
            if step == 3:
                change(model)
            optimizer.zero_grad()
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
        ends.append(list(model.parameters()))
    assert all(map(torch.equal, *ends))


def test_zero_grad_leaves_no_gradients_in_a_model_of_another_dtype() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    optimizer = isokron.AdamW(model.parameters(), flat=True)
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    model.double()
    optimizer.zero_grad()
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())


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


def test_parameters_whose_memory_is_shared_stay_where_they_are() -> None:
    rows = [nn.Parameter(row) for row in torch.randn(4, 64)]
    one, other, third = (nn.Parameter(torch.randn(64)) for _ in range(3))
    tied, view = nn.Parameter(one.detach()), other.data
    shared = nn.Parameter(torch.randn(64).share_memory_())
    params = [*rows, one, other, third, shared]
    before = [param.data_ptr() for param in params]
    optimizer = isokron.AdamW([{"params": params}, {"params": [tied]}], flat=True)
    for param in (*params, tied):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [param.data_ptr() for param in params] == before
    assert torch.equal(one, tied)
    assert torch.equal(other, view)
    assert shared.is_shared()
