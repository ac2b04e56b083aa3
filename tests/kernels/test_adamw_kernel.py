"""AdamW on lists against torch's fused operator: bits, layouts and neighbouring memory."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from isokron.kernels import adamw_

SETTINGS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}


def test_lists_of_other_lengths_are_refused() -> None:
    lists = [*([torch.ones(3), torch.ones(4)] for _ in range(4)), [], [torch.ones(())] * 2]
    with pytest.raises(ValueError, match=r"one length.*\[2, 1, 2, 2, 0, 2\]"):
        adamw_(lists[0], lists[1][:1], *lists[2:], **SETTINGS)


@pytest.mark.parametrize("kind", range(5))
def test_layouts_that_differ_are_refused_and_nothing_is_written(kind: int) -> None:
    """kind: which of parameter, gradient and moments has rows where the others have columns."""
    square = [[torch.rand(6, 6)] for _ in range(5)]
    square[kind] = [square[kind][0].T]
    lists = [*square, [torch.ones(())]]
    before = [[tensor.clone() for tensor in few] for few in lists]
    assert not adamw_(*lists, **SETTINGS)
    for tensors, copies in zip(lists, before, strict=True):
        assert all(map(torch.equal, tensors, copies))


@pytest.mark.parametrize("kind", range(4))
def test_other_dtypes_shapes_and_views_with_gaps_are_refused(kind: int) -> None:
    for wrong in (torch.rand(8, 4).double(), torch.rand(8, 8)[:, :4], torch.rand(4, 8).T):
        lists: list[Any] = [*([torch.rand(8, 4)] for _ in range(4)), [], [torch.ones(())]]
        lists[kind] = [wrong]
        assert not adamw_(*lists, **SETTINGS)


def test_views_with_gaps_are_refused_though_all_have_them() -> None:
    lists = [*([torch.rand(8, 8)[:, :4]] for _ in range(4)), [], [torch.ones(())]]
    assert not adamw_(*lists, **SETTINGS)


def trained(make: Any, change: Any, shape: tuple[int, ...] = (24, 16)) -> Tensor:
    """The parameter after six steps, with `change(param, optimizer)` called before the fourth."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(shape))
    optimizer = make([param])
    for step in range(6):
        if step == 3:
            change(param, optimizer)
        grad = torch.randn(shape)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.copy_(grad)
        optimizer.step()
    return param.detach()


def other_memory(param: Tensor, optimizer: Any) -> None:
    param.data = param.data.clone()


def other_order(param: Tensor, optimizer: Any) -> None:
    param.data = param.data.T.contiguous().T


def other_gradient(param: Tensor, optimizer: Any) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data.clone()


def transposed_gradient(param: Tensor, optimizer: Any) -> None:
    param.grad = torch.empty(tuple(reversed(param.shape))).T


def other_moments(param: Tensor, optimizer: Any) -> None:
    for value in optimizer.state[param].values():
        value.data = value.data.clone()


@pytest.mark.parametrize(
    "change",
    [other_memory, other_order, other_gradient, transposed_gradient, other_moments],
    ids=lambda change: change.__name__,
)
def test_tensors_pointed_to_other_memory_are_followed(change: Any) -> None:
    ours = trained(lambda params: isokron.AdamW(params, lr=0.1), change)
    torchs = trained(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), lambda *_: None)
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x.T.contiguous().T,
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: x[:1].expand_as(x),
        lambda x: x.flip(0).flip(0),
    ],
    ids=["transposed", "columns", "expanded", "plain"],
)
def test_gradients_of_any_layout_give_the_right_step(lay: Any) -> None:
    a, b = (nn.Parameter(torch.arange(48.0).view(6, 8)) for _ in range(2))
    c, d = (nn.Parameter(torch.ones(5)) for _ in range(2))
    ours, reference = isokron.AdamW([a, c], lr=0.1), torch.optim.AdamW([b, d], lr=0.1, fused=True)
    for _ in range(3):
        a.grad = lay(torch.randn(6, 8))
        b.grad = a.grad.contiguous().clone()
        c.grad = torch.randn(5)
        d.grad = c.grad.clone()
        ours.step()
        reference.step()
    assert torch.equal(a, b)
    assert torch.equal(c, d)


def test_a_column_slice_as_a_parameter_leaves_its_neighbours_alone() -> None:
    matrix = torch.randn(6, 8)
    outside = matrix[:, 4:].clone()
    a, b = nn.Parameter(matrix[:, :4]), nn.Parameter(matrix[:, :4].clone())
    ours, reference = isokron.AdamW([a], lr=0.1), torch.optim.AdamW([b], lr=0.1, fused=True)
    for _ in range(3):
        a.grad = torch.randn(6, 4)
        b.grad = a.grad.clone()
        ours.step()
        reference.step()
    assert torch.equal(a, b)
    assert torch.equal(matrix[:, 4:], outside)
    assert torch.equal(matrix[:, :4], b)


@pytest.mark.parametrize("param_last", [False, True])
@pytest.mark.parametrize("grad_last", [False, True])
def test_channels_last_pairs_step_alike(param_last: bool, grad_last: bool) -> None:
    def ordered(x: Tensor, last: bool) -> Tensor:
        return x.to(memory_format=torch.channels_last if last else torch.contiguous_format)

    weight = torch.randn(16, 4, 3, 3)
    a, b = nn.Parameter(ordered(weight.clone(), param_last)), nn.Parameter(weight.clone())
    ours, reference = isokron.AdamW([a], lr=0.1), torch.optim.AdamW([b], lr=0.1, fused=True)
    for _ in range(4):
        b.grad = torch.randn(16, 4, 3, 3)
        a.grad = ordered(b.grad.clone(), grad_last)
        ours.step()
        reference.step()
    assert torch.equal(a, b)


def test_gradients_are_not_kept_alive_between_steps() -> None:
    param = nn.Parameter(torch.randn(64))
    optimizer = isokron.AdamW([param])
    for _ in range(3):
        param.grad = torch.randn(64)
        gone = weakref.ref(param.grad)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert gone() is None


def test_a_sparse_gradient_is_refused_before_any_group_steps() -> None:
    first, second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(4, 2))
    optimizer = isokron.AdamW([{"params": [first]}, {"params": [second]}])
    first.grad, second.grad = torch.ones(8), torch.ones(4, 2)
    optimizer.step()
    before = first.detach().clone()
    second.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(first, before)


def test_threads_of_python_may_step_at_once() -> None:
    params = [nn.Parameter(torch.ones(5000)) for _ in range(4)]

    def step_often(param: nn.Parameter) -> None:
        optimizer = isokron.AdamW([param], lr=0.1)
        for turn in range(20):
            param.grad = torch.full((5000,), float(turn))
            optimizer.step()

    threads = [threading.Thread(target=step_often, args=(param,)) for param in params]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(param, params[0]) for param in params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 65, 4096])
def test_a_parameter_that_has_changed_its_shape_is_refused(size: int, dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = isokron.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = torch.ones(size, dtype=dtype)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"must keep its shape.*\(64,\)"):
        optimizer.step()


def test_counters_are_float32_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        params = [nn.Parameter(torch.ones(8, 8, dtype=torch.float32)) for _ in range(2)]
        optimizers = [isokron.AdamW(params[:1]), isokron.SOAP(params[1:])]
        for _ in range(300):
            for param, optimizer in zip(params, optimizers, strict=True):
                param.grad = torch.ones_like(param)
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for param, optimizer in zip(params, optimizers, strict=True):
        assert optimizer.state[param]["step"] == 300


def test_parameters_that_share_memory_are_stepped_in_their_order() -> None:
    """On two threads they would race; torch updates them one after the other."""
    code = """
import torch, isokron
from torch import nn
torch.manual_seed(0)
values = [torch.randn(1 << 16) for _ in range(2)]
grads = [[torch.randn(1 << 16) for _ in range(3)] for _ in range(4)]
ends = []
for make in (isokron.AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)):
    c, a = (nn.Parameter(value.clone()) for value in values)
    params = [c, a, nn.Parameter(a.data)]
    optimizer = make(params, lr=0.1)
    for row in grads:
        for param, grad in zip(params, row):
            param.grad = grad.clone()
        optimizer.step()
    ends.append([param.detach() for param in params])
assert torch.get_num_threads() == 2
assert all(map(torch.equal, *ends))
"""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
