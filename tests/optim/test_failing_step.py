"""An operation that fails in the middle of a step, as for want of memory."""

import copy
from typing import Any

import pytest
import torch

import isokron
from cases import CASES, Case, equal, loss_of, natural, net
from isokron.optim import natural_gradient

RULE = "an error in the middle of a step leaves parameters and state as they were"
HOOKS = [
    pytest.param(case, hook, id=f"{case.name}-{hook}")
    for case in CASES
    for hook in ("observe", "refresh", "direction")
    if "adamw" not in case.name
    and case.settings.get("route") != "spectral"
    and (hook != "refresh" or case.optimizer.refresh is not isokron.Preconditioned.refresh)
]


def failing(*args: Any) -> Any:
    raise MemoryError("out of memory")


def test_a_closure_that_fails_leaves_no_trace() -> None:
    model = net()
    optimizer = isokron.SOAP(model.parameters())
    with pytest.raises(MemoryError):
        optimizer.step(failing)
    assert equal(model, net())
    assert not optimizer.state


def assert_unchanged_by_the_step_that_fails(model: Any, optimizer: Any) -> None:
    for seed in range(3, 15):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        before = copy.deepcopy((model, optimizer.state_dict()["state"]))
        try:
            optimizer.step()
        except MemoryError:
            break
    else:
        raise RuntimeError("the operation was not called")
    assert equal(model, before[0])
    for number, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][number][key]) for key, value in entry.items())


def steps(model: Any, optimizer: Any) -> None:
    for seed in range(3):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


@pytest.mark.xfail(raises=AssertionError, strict=True, reason=RULE)
@pytest.mark.parametrize(("case", "hook"), HOOKS)
def test_an_error_in_a_hook_leaves_everything_as_it_was(case: Case, hook: str) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    steps(model, optimizer)
    setattr(optimizer, hook, failing)
    assert_unchanged_by_the_step_that_fails(model, optimizer)


@pytest.mark.xfail(raises=AssertionError, strict=True, reason=RULE)
def test_an_error_in_a_decomposition_leaves_a_natural_gradient_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    optimizer = natural(model)
    steps(model, optimizer)
    monkeypatch.setattr(natural_gradient, "decompose", failing)
    assert_unchanged_by_the_step_that_fails(model, optimizer)
