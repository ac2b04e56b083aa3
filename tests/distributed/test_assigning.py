"""Who owns what, by what it costs."""

import random

import pytest

from isokron.distributed import assign, block_cost


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
    group = {"max_dim": 64, "every": 10}
    assert block_cost((8, 32), group) == 2 * 256 * 41 + 10 * (8**3 + 32**3) / 10
    assert block_cost((8, 128), group) == 2 * 1024 * 9 + 10 * 8**3 / 10
