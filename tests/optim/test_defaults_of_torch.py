"""torch's default device and dtype are for a script's tensors; an optimizer's have their own."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cases import MAKERS, equal, loss_of, net

every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def trained(make: Callable[[nn.Module], Any], set_defaults: Callable[[], None]) -> nn.Module:
    """Steps, a checkpoint loaded into a new optimizer, and steps, under other defaults."""
    model = net()
    optimizer = make(model)
    for seed in range(12):
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        set_defaults()
        if seed == 7:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(model)
            optimizer.load_state_dict(saved)
        optimizer.step()
        getattr(optimizer, "statistics", list)()
    return model


@every_maker
def test_the_default_device_is_not_the_optimizers(make: Callable[[nn.Module], Any]) -> None:
    """On the meta device tensors have no values: one that is made there ends a step."""
    here = trained(make, lambda: None)
    assert equal(trained(make, lambda: torch.set_default_device("meta")), here)


@every_maker
def test_the_default_dtype_is_not_the_optimizers(make: Callable[[nn.Module], Any]) -> None:
    plain = trained(make, lambda: None)
    assert equal(trained(make, lambda: torch.set_default_dtype(torch.float64)), plain)
