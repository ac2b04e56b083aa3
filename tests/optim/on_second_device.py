"""Optimizers on a device that is not the CPU; run by test_second_device.py."""

import copy
import io
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import isokron
from cases import CASES, DEVICE, Case, batch, build, equal, loss_of, net, randn, train
from isokron.curvature import running_fisher

if DEVICE == "cpu":
    pytest.skip("run by test_second_device.py", allow_module_level=True)

from second_device import counted


def in_float32(case: Case) -> Case:
    """Polar factors are iterated in bfloat16 on devices, unless one asks for another dtype."""
    muon = case.optimizer is isokron.Muon
    return replace(case, settings={**case.settings, "dtype": torch.float32}) if muon else case


every_case = pytest.mark.parametrize(
    "case", [in_float32(case) for case in CASES], ids=lambda case: case.name
)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()


def on_cpu(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("cpu")


def assert_near(here: nn.Module, there: nn.Module, case: Case | None = None) -> None:
    """A step is about 1e-2 long; polar factors are in bfloat16 on devices."""
    rounded = case is not None and ("polar" in case.name or case.name == "spectral")
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        one, other = mine.detach().cpu(), theirs.detach().cpu()
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2 if rounded else 3e-5)


def stepped_on_both(make: Any, steps: int, missing: int = -1) -> tuple[nn.Module, nn.Module]:
    """A model on the device and its twin on the CPU, both after the same gradients.

    `missing`: the step in which one gradient is missing.
    """
    here = net()
    there = on_cpu(here)
    optimizer, reference = make(here), make(there)
    for step in range(steps):
        backward(here, optimizer, step)
        if step == missing:
            here.square.weight.grad = None
        for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.cpu()
        with counted() as stalls:
            optimizer.step()
        assert len(stalls) <= 1, (step, stalls)
        reference.step()
    return here, there


def test_the_device_is_another_one_and_what_waits_for_it_is_counted() -> None:
    x, index = randn(3, 4), torch.tensor([0, 2])
    assert x.device.type == DEVICE
    with pytest.raises(RuntimeError, match="found one on the CPU"):
        x + torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="found one on the CPU"):
        x[index]
    with pytest.raises(RuntimeError, match="read too early"):
        x.to("cpu", non_blocking=True)
    with counted() as stalls:
        x.sum().item()
        x.tolist()
        bool((x > 0).any())
        x.cpu()
        torch.ones(2).to(DEVICE)
        x[x > 0]
        x.copy_(torch.ones(3, 4))
    assert len(stalls) == 7
    with counted() as stalls:
        y = torch.ones(3, 4).to(DEVICE, non_blocking=True)
        (x + y * 2.0)[index.to(DEVICE, non_blocking=True)].masked_fill_(y[:2] > 0, 1.0)
    assert stalls == []


@every_case
def test_a_step_has_the_numbers_of_the_cpu_and_waits_for_the_device_once_at_most(
    case: Case,
) -> None:
    """Refreshes, landings and missing gradients included."""
    here, there = stepped_on_both(lambda model: case.make(isokron.param_groups(model)), 10, 6)
    assert_near(here, there, case)


def test_what_ranks_agree_on_waits_for_the_device_once_at_most() -> None:
    """The norms of all gradients are read with the sums that tell whether they are finite."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = net()
    optimizer = isokron.SOAP(isokron.param_groups(model))
    optimizer.distribute()
    for step in range(2):  # in the first, the values of parameters are compared too
        backward(model, optimizer, step)
        with counted() as stalls:
            optimizer._agreement.agreed(optimizer.param_groups, optimizer._check_step)
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
    assert len(stalls) == 1, stalls
    assert optimizer._agreement.length == pytest.approx(squares**0.5, rel=1e-6)
    dist.destroy_process_group()


@every_case
def test_models_on_two_devices_step_as_on_one(case: Case) -> None:
    case = replace(case, settings={**case.settings, "refresh": "together"})
    here = net()
    there = on_cpu(here)
    mixed = copy.deepcopy(here)
    mixed.hidden.to("cpu")
    mixed.twin.to("cpu")
    optimizer, plain = case.make(mixed.parameters()), case.make(there.parameters())
    for step in range(4):
        here.zero_grad()
        loss_of(here, step).backward()
        gradients = [p.grad for p in here.parameters()]
        for param, other, grad in zip(
            mixed.parameters(), there.parameters(), gradients, strict=True
        ):
            param.grad, other.grad = grad.to(param.device), grad.cpu()
        optimizer.step()
        plain.step()
    assert_near(mixed, there, case)


@every_case
@pytest.mark.parametrize("to", ["cpu", DEVICE])
def test_a_checkpoint_of_one_device_goes_on_on_the_other(case: Case, to: str) -> None:
    model = net() if to == "cpu" else on_cpu(net())
    optimizer = case.make(model.parameters())
    grads = [[randn(*p.shape) for p in model.parameters()] for _ in range(8)]

    def step(stepped: nn.Module, by: torch.optim.Optimizer, number: int) -> None:
        for param, grad in zip(stepped.parameters(), grads[number], strict=True):
            param.grad = grad.to(param.device)
        by.step()

    for number in range(5):
        step(model, optimizer, number)
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    other = net().to(to)
    other.load_state_dict(weights)
    resumed = case.make(other.parameters())
    resumed.load_state_dict(state)
    for number in range(5, 8):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert_near(model, other, case)


@pytest.mark.parametrize("average", ["schedule_free", "primal"])
def test_averages_are_those_of_the_cpu(average: str) -> None:
    optimizers = []

    def make(model: nn.Module) -> isokron.Preconditioned:
        optimizers.append(isokron.Shampoo(model.parameters(), every=3, average=average))
        return optimizers[-1]

    here, there = stepped_on_both(make, 6)
    assert_near(here, there)
    for optimizer in optimizers:
        optimizer.eval()
    assert_near(here, there)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_changes_nothing(nonfinite: str) -> None:
    model = net()
    optimizer = isokron.SOAP(model.named_parameters(), nonfinite=nonfinite)
    train(model, optimizer, range(2))
    before = copy.deepcopy(model)
    backward(model, optimizer, 2)
    model.square.weight.grad[0, 0] = torch.nan
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match=r"square\.weight"):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.skipped_steps == 1
    assert equal(model, before)


def test_a_refresh_that_fails_is_told_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = nn.Parameter(randn(6, 5))
    optimizer = build(isokron.Katie, [("weight", weight)], every=1, tolerated=0)

    def step() -> None:
        weight.grad = randn(6, 5)
        optimizer.step()

    step()
    root = optimizer.state[weight]["root.0.0"].clone()
    eigh = torch.linalg.eigh
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda *a, **k: [x * torch.nan for x in eigh(*a, **k)]
    )
    step()
    assert torch.equal(optimizer.state[weight]["root.0.0"], root)
    before = weight.detach().clone()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(FloatingPointError, match=r"tolerated=0.*'weight'"),
    ):
        step()
    assert "refresh of parameter 'weight'" in caplog.text
    assert optimizer.failed_refreshes == 1
    assert torch.equal(weight, before)


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_the_natural_gradient_is_that_of_the_cpu_and_waits_once(method: str) -> None:
    here = net()
    there = on_cpu(here)
    optimizers = [isokron.NaturalGradient(model, method=method, every=2) for model in (here, there)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, target = batch(step)
        nn.functional.cross_entropy(here(x), target).backward()
        nn.functional.cross_entropy(there(x.cpu()), target.cpu()).backward()
        with counted() as stalls:
            optimizers[0].step()
        assert len(stalls) == (2 if step in (0, 1, 2, 4) else 1)  # another one where it refreshes
        optimizers[1].step()
    assert_near(here, there)


def test_the_natural_gradient_resumes_from_a_checkpoint_and_counts_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, every=1)
    train(model, optimizer, range(3))
    twin = net(seed=1)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = isokron.NaturalGradient(twin, every=1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(3, 5))
    train(twin, resumed, range(3, 5))
    assert equal(model, twin)
    eigh = running_fisher.eigh
    monkeypatch.setattr(running_fisher, "eigh", lambda matrix, _: eigh(matrix * torch.nan))
    train(model, optimizer, range(5, 6))
    assert optimizer.failed_refreshes == len(optimizer.report())
    assert all(p.isfinite().all() for p in model.parameters())
