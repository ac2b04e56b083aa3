"""Averages of iterates against naive versions, and parameters that know what they show."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import isokron
from cases import equal, net, train
from naive import gradients


@pytest.mark.parametrize("kind", ["schedule_free", "primal"])
def test_averaging_follows_the_naive_version(kind: str) -> None:
    """Momentum descent with weight decay under it, and a learning rate that changes."""
    beta, keep, decay = 0.8, 0.9, 0.01
    grads = gradients((4, 5), 14)
    weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
    optimizer = isokron.Preconditioned(
        [weight],
        0.1,
        momentum=0.5,
        weight_decay=decay,
        average=kind,
        average_beta=beta,
        average_decay=keep,
    )
    x = z = y = weight.detach().clone()
    m, total = torch.zeros(4, 5).double(), 0.0
    for t, grad in enumerate(grads, start=1):
        lr = 0.1 * min(1.0, t / 5)
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = grad
        optimizer.step()
        m = 0.5 * m + 0.5 * grad
        z = z - lr * (m / (1 - 0.5**t) + decay * y)
        total += lr**2
        c = lr**2 / total if kind == "schedule_free" else 1 - keep
        x = (1 - c) * x + c * z
        y = beta * x + (1 - beta) * z
        torch.testing.assert_close(weight.detach(), y, rtol=1e-9, atol=1e-9)
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), x, rtol=1e-9, atol=1e-9)
    optimizer.train()
    torch.testing.assert_close(weight.detach(), y, rtol=1e-9, atol=1e-9)


CASES: list[tuple[Any, dict[str, Any]]] = [
    (isokron.SOAP, {"every": 3}),
    (isokron.Shampoo, {"every": 3}),
    (isokron.Katie, {"every": 3}),
    (isokron.Muon, {}),
]
KINDS = ["schedule_free", "primal"]


@pytest.mark.parametrize(
    ("method", "settings"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("kind", KINDS)
def test_looking_at_the_average_changes_no_bit_of_the_training(
    method: Any, settings: dict[str, Any], kind: str
) -> None:
    """All parameters take part, those that AdamW steps too; half of them here are such."""
    model, reference = net(), net()
    optimizer = method(model.parameters(), lr=1e-2, average=kind, **settings)
    plain = method(reference.parameters(), lr=1e-2, average=kind, **settings)
    for step in range(8):
        train(model, optimizer, range(step, step + 1))
        train(reference, plain, range(step, step + 1))
        optimizer.eval()
        assert equal(model, reference) == (step == 0 and kind == "schedule_free")
        optimizer.eval()  # twice is once
        optimizer.train()
    assert equal(model, reference)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_checkpoint_taken_in_either_mode_resumes_to_the_same_bits(mode: str) -> None:
    model = net()
    settings = {"lr": 1e-2, "every": 3, "average": "schedule_free"}
    optimizer = isokron.SOAP(model.parameters(), **settings)
    train(model, optimizer, range(5))
    getattr(optimizer, mode)()
    other = net(seed=1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = isokron.SOAP(other.parameters(), **settings)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for module, opt in ((model, optimizer), (other, resumed)):
        opt.train()
        train(module, opt, range(5, 9))
    assert equal(model, other)


def test_a_step_on_the_average_is_refused() -> None:
    model = net()
    optimizer = isokron.SOAP(model.parameters(), average="primal")
    train(model, optimizer, range(2))
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"call optimizer.train\(\)"):
        train(model, optimizer, range(2, 3))


def test_averaging_that_is_switched_off_in_evaluation_can_go_on() -> None:
    model = net()
    optimizer = isokron.SOAP(model.parameters(), average="primal")
    train(model, optimizer, range(2))
    optimizer.eval()
    optimizer.param_groups[0]["average"] = None
    optimizer.train()
    train(model, optimizer, range(2, 3))


def test_adamw_averages_too() -> None:
    model = net()
    optimizer = isokron.AdamW(model.parameters(), average="schedule_free")
    train(model, optimizer, range(3))
    before = copy.deepcopy(model)
    optimizer.eval()
    assert not equal(model, before)


def test_without_averaging_both_modes_are_the_same() -> None:
    model = net()
    optimizer = isokron.SOAP(model.parameters())
    optimizer.eval()
    assert not optimizer.state
    train(model, optimizer, range(2))
    before = copy.deepcopy(model)
    optimizer.eval()
    assert equal(model, before)
    train(model, optimizer, range(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_at_a_constant_rate_the_average_ends_nearer_to_the_optimum(kind: str) -> None:
    """Gradients of ½|W|² with noise: the iterate keeps jumping, its average settles."""
    distance = {}
    for average in (None, kind):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(6, 6))
        optimizer = isokron.Preconditioned([weight], 0.3, average=average)
        for _ in range(300):
            weight.grad = weight.detach() + torch.randn(6, 6)
            optimizer.step()
        optimizer.eval()
        distance[average] = weight.norm().item()
    assert distance[kind] < 0.5 * distance[None]
