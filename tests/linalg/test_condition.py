"""Eigenvalues lifted to a condition number, also those that stand for many."""

import pytest
import torch

from isokron.linalg import lift


def test_every_eigenvalue_ends_at_least_at_the_largest_over_the_condition() -> None:
    values = torch.tensor([[1e-9, 0.05, 0.2, 2.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    found = lift(values, 10.0)
    assert found.values.tolist() == [[0.2, 0.2, 0.2, 2.0], [1.0] * 4]
    assert found.lifted.tolist() == [2, 0]


def test_eigenvalues_that_stand_for_many_are_lifted_and_counted_as_many() -> None:
    values = torch.rand(3, 4, dtype=torch.float64)
    rest = torch.tensor([[0.0], [0.3], [5.0]], dtype=torch.float64)
    found = lift(values, 4.0, rest, 6)
    wanted = lift(torch.cat([values, rest.expand(3, 6)], -1), 4.0)
    assert torch.equal(found.values, wanted.values[:, :4])
    assert torch.equal(found.rest, wanted.values[:, 4:5])
    assert torch.equal(found.lifted, wanted.lifted)


def test_a_rest_of_multiplicity_zero_is_not_there() -> None:
    found = lift(torch.tensor([1.0, 4.0]), 2.0, 100.0, 0)
    assert found.values.tolist() == [2.0, 4.0]
    assert found.lifted.item() == 1


def test_rounding_below_zero_is_lifted_and_zeros_alone_are_not() -> None:
    assert lift(torch.tensor([-1e-9, 1.0]), float("inf")).lifted.item() == 1
    assert lift(torch.zeros(3), 10.0, 0.0, 5).lifted.item() == 0


@pytest.mark.parametrize("condition", [0.5, -1.0, float("nan")])
def test_conditions_below_one_are_an_error(condition: float) -> None:
    with pytest.raises(ValueError, match=r"max_condition must be at least 1, got"):
        lift(torch.ones(3), condition)
    with pytest.raises(ValueError, match=r"multiplicity must be at least 0, got -1"):
        lift(torch.ones(3), 2.0, 0.0, -1)
