"""Settings of groups that are assigned after construction, by schedules and by hand."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import isokron
from cases import CASES, Case, equal, loss_of, net, train

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@every_case
def test_the_callers_tensor_is_the_learning_rate_of_every_group(case: Case) -> None:
    model, rate = net(), torch.tensor(1e-2)
    optimizer = case.make(isokron.param_groups(model), lr=rate)
    train(model, optimizer, range(2))
    rate.zero_()
    before = copy.deepcopy(model)
    train(model, optimizer, range(2, 4))
    assert equal(model, before)


TWO_RATES = {"conv.*": 1.0, "*": 4.0}


def cosine(optimizer: torch.optim.Optimizer, rates: list[float]) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)


def one_cycle(optimizer: torch.optim.Optimizer, rates: list[float]) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=6)


def falling(optimizer: torch.optim.Optimizer, rates: list[float]) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)


@pytest.mark.parametrize(
    ("schedule", "kind"), [(cosine, float), (one_cycle, float), (falling, torch.tensor)]
)
@every_case
def test_under_a_schedule_multiples_are_learning_rates_of_groups(
    case: Case, kind: Any, schedule: Any
) -> None:
    """One `lr` and lr_scale, against an `lr` of each group: the same bits, at every step."""
    model, reference = net(), net()
    groups = isokron.param_groups(model, lr_scale=TWO_RATES)
    by_hand = isokron.param_groups(reference, lr_scale=TWO_RATES)
    rates = [2**-7 * group.pop("lr_scale") for group in by_hand]
    by_hand = [{**group, "lr": kind(rate)} for group, rate in zip(by_hand, rates, strict=True)]
    pairs = [(model, case.make(groups, lr=kind(2**-7))), (reference, case.make(by_hand))]
    peaks = [2**-7] * len(rates), rates
    schedules = [schedule(pair[1], peak) for pair, peak in zip(pairs, peaks, strict=True)]
    for step in range(4):
        for (trained, optimizer), schedule_of in zip(pairs, schedules, strict=True):
            train(trained, optimizer, range(step, step + 1))
            schedule_of.step()
        assert equal(model, reference), step


WRONG_LATER = [
    *(("lr", -1.0), ("lr", math.nan), ("betas", (1.5, 0.9)), ("graft", "foo"), ("refresh", "foo")),
    *(("decay", "foo"), ("every", 0), ("max_dim", 0), ("weight_decay", -0.1), ("polar", 1)),
    *(("basis", "foo"), ("tolerance", -1.0), ("stacked", 7)),
]


@pytest.mark.parametrize(("name", "value"), WRONG_LATER)
def test_a_setting_that_is_assigned_later_is_checked(name: str, value: Any) -> None:
    model, reference = net(), net()
    optimizer, plain = (isokron.SOAP(m.parameters(), every=2) for m in (model, reference))
    train(model, optimizer, range(2))
    group = optimizer.param_groups[0]
    right = group[name]
    group[name] = value
    before = copy.deepcopy(model)
    loss_of(model, 9).backward()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"SOAP.*{name}"):
            optimizer.step()
    assert equal(model, before)
    group[name] = right
    train(reference, plain, range(2))
    for module, opt in ((model, optimizer), (reference, plain)):
        train(module, opt, range(2, 4))
    assert equal(model, reference)


def test_scheduled_numbers_of_numpy_and_lists_move_no_state() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = isokron.SOAP([weight], weight_decay=0.1)
    (group,), addresses = optimizer.param_groups, set()
    for step in range(4):
        group["weight_decay"] = np.float32(0.1 + step)
        group["betas"] = [0.9 - 0.1 * step, np.float64(0.95)]
        group["lr"] = np.float32(1e-3)
        weight.grad = torch.eye(4)
        optimizer.step()
        addresses.add(optimizer.state[weight]["rotated.0"].data_ptr())
    assert len(addresses) == 1
    assert group["betas"] == (0.9 - 0.1 * 3, 0.95)
    assert type(group["lr"]) is type(group["weight_decay"]) is float
