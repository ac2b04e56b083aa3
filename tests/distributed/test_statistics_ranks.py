"""optimizer.statistics() on two ranks gives the numbers of one process, on both."""

from typing import Any

import pytest
import torch
from test_ownership import STEPS, make, sharded, stepped
from torch import distributed as dist
from torch import nn

import isokron
from cases import CASES
from processes import mesh, run

Statistics = list[dict[str, Any]]


def of_ranks(numbers: list[int], kind: str) -> list[Statistics]:
    statistics = []
    for number in numbers:
        case = CASES[number]
        params, optimizer = make(case)
        if kind == "sharded":
            params = sharded(params, mesh(dist.get_world_size()))
            optimizer = case.make(params)
        elif kind == "whole":
            optimizer.distribute()
        optimizer.statistics()
        stepped(params, optimizer, range(STEPS))
        statistics.append(optimizer.statistics())
    return statistics


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_two_ranks_have_the_statistics_of_one_process(kind: str) -> None:
    numbers = list(range(len(CASES)))
    wanted = of_ranks(numbers, "alone")
    first, second = run(2, of_ranks, numbers, kind)
    assert first == second
    for number, one, many in zip(numbers, wanted, first, strict=True):
        assert many[0].pop("name") == one[0].pop("name")
        for key, value in one[0].items():
            message = f"{CASES[number].name}: {key}"
            # codes of 8 bits and factors of bfloat16 are rounded from sums in another order
            tolerance = 1e-2 if CASES[number].name.endswith("-small") else 1e-6
            assert many[0][key] == (
                None if value is None else pytest.approx(value, rel=tolerance)
            ), message


def parts_of_a_mesh() -> Statistics:
    """One group that every rank steps by itself, and one that is sharded."""
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(6, 4, dtype=torch.float64)) for _ in range(2)]
    groups = [{"params": [plain[0]]}, {"params": sharded(plain[1:], mesh(2))}]
    optimizer = isokron.Shampoo(groups, every=2)
    optimizer.statistics()
    for _ in range(4):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = param.detach().clone()
        optimizer.step()
    return optimizer.statistics()


def test_groups_that_are_shared_and_not_shared_are_counted_once() -> None:
    first, second = run(2, parts_of_a_mesh)
    assert first == second
    alone, together = first
    assert alone["state_bytes"] == together["state_bytes"]
    assert alone["refreshes"] == together["refreshes"] == 2
    assert None not in (*alone.values(), *together.values())
