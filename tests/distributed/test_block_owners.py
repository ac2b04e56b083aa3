"""Owners by least load: the quick way gives what one block after the other gives."""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import isokron
from cases import build
from isokron.distributed import assign, block_cost
from isokron.distributed.block_exchange import directions_traffic
from isokron.distributed.block_owners import refresh_cost
from isokron.distributed.dtensor import padded_part


def naive(costs: list[float], together: list[int], loads: list[float]) -> list[int]:
    """The costliest first, each to the first rank of least load."""
    sums: dict[int, float] = {}
    for key, cost in zip(together, costs, strict=True):
        sums[key] = sums.get(key, 0.0) + cost
    owner = {}
    for key in sorted(sums, key=lambda key: -sums[key]):
        owner[key] = loads.index(min(loads))
        loads[owner[key]] += sums[key]
    return [owner[key] for key in together]


@pytest.mark.parametrize("seed", range(40))
def test_many_equal_blocks_have_the_owners_of_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    ranks, count = rng.choice([1, 2, 63, 64, 65, 200, 300]), rng.randint(0, 2500)
    some = [rng.choice([0.0, 1.0, 0.1, 1e-20, 7.3, 100.0, 1 / 3, 1e6]) for _ in range(4)]
    costs = [rng.choice(some) for _ in range(count)]
    keys = list(range(count)) if seed % 2 else [rng.randint(0, count // 3 + 1) for _ in costs]
    loads = [rng.choice([0.0, 0.0, 5.0, 1000 * rng.random()]) for _ in range(ranks)]
    others = list(loads)
    assert assign(costs, keys, loads) == naive(costs, keys, others)
    assert loads == others


def test_the_cost_of_a_polar_factor_is_what_its_products_count() -> None:
    optimizer = isokron.Muon([torch.nn.Parameter(torch.empty(300, 512, device="meta"))])
    group = optimizer.param_groups[0]
    with FlopCounterMode(display=False) as counted:
        optimizer.direction(torch.empty(1, 300, 512, device="meta"), {}, group)
    work = optimizer.work(group)
    assert refresh_cost((300, 512), group, work) == counted.get_total_flops()
    assert refresh_cost((512, 300), group, work) == refresh_cost((300, 512), group, work)


def test_diagonal_factors_cost_no_cubes() -> None:
    param = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    optimizer = build(isokron.Quad, [param], max_size_dense=1000)
    group = optimizer.param_groups[0]
    work = optimizer.work(group)
    assert refresh_cost((256, 256), group, work) == 10 * 2 * 256**3
    assert refresh_cost((256, 2000), group, work) == 10 * 256**3
    assert refresh_cost((2000,), group, work) == 0
    assert block_cost((2000,), group, work) == 2 * 2000


def test_a_key_that_is_called_steps_makes_no_method_a_polar_one() -> None:
    params = [torch.nn.Parameter(torch.empty(8, 32, device="meta"))]
    optimizer = isokron.SOAP(params)
    group = {**optimizer.param_groups[0], "steps": 3}
    assert optimizer.work(group) == "eigen"
    assert refresh_cost((8, 32), group, optimizer.work(group)) == 10 * (8**3 + 32**3)
    spectral = build(isokron.SOAP, params, route="spectral")
    group, plain = spectral.param_groups[0], isokron.Muon(params)
    muon = refresh_cost((8, 32), plain.param_groups[0], plain.work(plain.param_groups[0]))
    assert refresh_cost((8, 32), group, spectral.work(group)) == muon


def test_what_is_padded() -> None:
    assert padded_part((13, 10), 4) == 4 * 10
    assert padded_part((2,), 4) == 1


def test_the_costliest_goes_first_to_whom_has_least() -> None:
    loads = [0.0, 0.0]
    assert assign([5, 3, 3, 2, 2, 1], range(6), loads) == [0, 1, 1, 0, 1, 0]
    assert loads == [8, 8]
    assert assign([1, 1, 1], range(3), [0.0] * 5) == [0, 1, 2]
    assert assign([], [], [0.0]) == []


def test_what_belongs_together_has_one_owner() -> None:
    owners = assign([1, 4, 1, 4, 2], ["a", "b", "a", "b", "c"], [0.0, 0.0])
    assert owners == [1, 0, 1, 0, 1]


def test_work_there_is_already_counts() -> None:
    assert assign([1.0, 1.0], range(2), [5.0, 0.0]) == [1, 1]


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_no_rank_has_more_than_four_thirds_of_the_least_possible(ranks: int) -> None:
    """Graham, 1969: with each cost below a rank's share, the longest is within 4/3 − 1/(3R)."""
    drawn = random.Random(0)
    costs = [drawn.uniform(0.1, 1.0) for _ in range(20 * ranks)]
    loads = [0.0] * ranks
    owners = assign(costs, range(len(costs)), loads)
    for rank in range(ranks):
        own = sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        assert own == pytest.approx(loads[rank])
    assert max(loads) <= 4 / 3 * sum(costs) / ranks


def test_cost_counts_factors_of_short_dimensions_alone() -> None:
    group = {"max_dim": 64, "every": 10, "route": "auto"}
    assert block_cost((8, 32), group) == 2 * 256 * 41 + 10 * (8**3 + 32**3) / 10
    assert block_cost((8, 128), group) == 2 * 1024 * 9 + 10 * 8**3 / 10


def test_directions_of_few_owners_are_broadcast_and_not_padded() -> None:
    assert directions_traffic([0, 1, 2, 2], 100, 3) == 2 * 100 * 2  # gathered, padded to 2 a rank
    assert directions_traffic([5], 6400, 64) == 6300  # and not 63 · 6400
    for owners in ([0], [3, 3], list(range(8)), [0, 1] * 4):
        needed = len(owners) * 6400
        assert directions_traffic(owners, 6400, 64) <= 2 * needed
