"""An operation that fails in the middle of a step, as for want of memory."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

import isokron
from cases import CASES, Case, equal, loss_of, natural, net
from isokron.optim import natural_step

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


def interrupted(*args: Any) -> Any:
    raise KeyboardInterrupt


def test_a_closure_that_fails_leaves_no_trace() -> None:
    model = net()
    optimizer = isokron.SOAP(model.parameters())
    with pytest.raises(MemoryError):
        optimizer.step(failing)
    assert equal(model, net())
    assert not optimizer.state


def test_an_interruption_is_told_and_leaves_the_optimizer_usable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    optimizer = isokron.SOAP(model.parameters())
    loss_of(model, 0).backward()
    optimizer.direction = interrupted
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert "SOAP was interrupted in the middle of a step" in caplog.text
    del optimizer.direction
    optimizer.step()
    assert optimizer.state_dict()["state"]


def assert_refused_until_loaded(model: Any, optimizer: Any, mend: Callable[[], None]) -> None:
    """A step fails, and nothing is done with what it left until a state is loaded."""
    for seed in range(3, 15):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        try:
            optimizer.step()
        except MemoryError:
            break
    else:
        raise RuntimeError("the operation was not called")
    mend()
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"failed in the middle \(MemoryError: out of mem"):
            call()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    loss_of(model, 20).backward()
    optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())


def steps(model: Any, optimizer: Any) -> None:
    for seed in range(3):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


@pytest.mark.parametrize(("case", "hook"), HOOKS)
def test_an_optimizer_whose_step_failed_is_refused(case: Case, hook: str) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    steps(model, optimizer)
    setattr(optimizer, hook, failing)
    assert_refused_until_loaded(model, optimizer, lambda: delattr(optimizer, hook))


def test_a_natural_gradient_whose_decomposition_failed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    optimizer = natural(model)
    steps(model, optimizer)
    monkeypatch.setattr(natural_step, "decompose", failing)
    assert_refused_until_loaded(model, optimizer, monkeypatch.undo)
