"""Cholesky factors against dense matrices, and every rung by a matrix made for it."""

import logging
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from isokron.linalg import factorize
from isokron.linalg.cholesky import FLOOR, JITTERS


def positive(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    eye = torch.eye(shape[-1], dtype=torch.float64)
    return (root @ root.mT / shape[-1] + 0.1 * eye).to(dtype)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def with_least(least: float, n: int = 4) -> Tensor:
    """Eigenvalues 1, …, 1 and `least` in a random basis; its mean diagonal is near 1."""
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    values = torch.ones(n, dtype=torch.float64)
    values[0] = least
    return (basis * values) @ basis.mT


# a matrix for every rung, and what is factorized in its place: A + shift·mean diagonal
ALMOST_ONE = 1 - 2.0**-24
RUNGS: dict[str, tuple[Tensor, float]] = {
    "as given": (torch.eye(3), 0.0),
    "float64": (torch.tensor([[1.0, ALMOST_ONE], [ALMOST_ONE, 1.0]]), 0.0),
    "jitter 1e-08": (torch.ones(3, 3, dtype=torch.float64), 1e-8),
    "jitter 1e-05": (torch.ones(3, 3).double() - 2e-6 * torch.eye(3).double(), 1e-5),
    "jitter 0.001": (torch.diag(torch.tensor([1.0, 1.0, -5e-4])), 1e-3),
}


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_solutions_inverse_and_determinant_are_those_of_the_damped_matrix(
    batch: tuple[int, ...], damping: float
) -> None:
    matrix = positive(*batch, 5)
    damped = matrix + damping * torch.eye(5, dtype=torch.float64)
    found = factorize(matrix, damping)
    close(found.lower @ found.lower.mT, damped)
    y = torch.randn(*batch, 5, 2, dtype=torch.float64)
    close(found.solve(y), torch.linalg.solve(damped, y))
    close(found.solve(y[..., 0]), torch.linalg.solve(damped, y)[..., 0])
    close(found.inverse(), torch.linalg.inv(damped))
    close(found.logdet(), torch.logdet(damped))
    assert Counter(found.rungs) == {"as given": max(1, torch.Size(batch).numel())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_computed_in_float32_and_answers_in_that_of_the_question(
    dtype: torch.dtype,
) -> None:
    matrix = positive(3, 6, dtype=dtype)
    found = factorize(matrix, 0.1)
    assert found.lower.dtype is torch.float32
    damped = matrix.double() + 0.1 * torch.eye(6, dtype=torch.float64)
    close(found.inverse().double(), torch.linalg.inv(damped), 1e-5)
    y = torch.randn(3, 6, 2, dtype=dtype)
    assert found.solve(y).dtype is dtype
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    close(found.solve(y).double(), torch.linalg.solve(damped, y.double()), tolerance)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_matrix_climbs_as_far_as_it_must_and_no_further(rung: str) -> None:
    matrix, jitter = RUNGS[rung]
    found = factorize(matrix)
    assert found.rungs == (rung,)
    wide = matrix.double()
    shifted = wide + jitter * wide.diagonal().abs().mean() * torch.eye(len(wide)).double()
    close(found.lower.double() @ found.lower.double().mT, shifted, 1e-15)
    assert found.lower.dtype is (matrix.dtype if rung == "as given" else torch.float64)


def test_an_indefinite_matrix_has_its_eigenvalues_lifted() -> None:
    matrix = with_least(-0.5)
    found = factorize(matrix)
    assert found.rungs == ("eigh",)
    values, basis = torch.linalg.eigh(matrix)
    lifted = (basis * values.clamp(min=FLOOR * values.max())) @ basis.mT
    close(found.lower @ found.lower.mT, lifted)
    close(found.inverse(), torch.linalg.inv(lifted), 1e-10)
    close(found.logdet(), torch.logdet(lifted))
    assert torch.equal(found.lower, found.lower.tril())
    assert (found.lower.diagonal() > 0).all()


def test_one_bad_matrix_of_a_batch_moves_no_other(caplog: pytest.LogCaptureFixture) -> None:
    good, singular, bad = positive(4), torch.ones(4, 4).double(), with_least(-0.5)
    batch = torch.stack([good, singular, bad, good]).view(2, 2, 4, 4)
    with caplog.at_level(logging.WARNING):
        found = factorize(batch, name="layer 3")
    assert found.rungs == ("as given", "jitter 1e-08", "eigh", "as given")
    assert torch.equal(found.lower[0, 0], factorize(good).lower)
    assert torch.equal(found.lower[1, 0], factorize(bad).lower)
    assert [record.getMessage() for record in caplog.records][:2] == [
        "Cholesky of layer 3: 1 of 4 by jitter 1e-08",
        "Cholesky of layer 3: 1 of 4 by eigh",
    ]


def test_float64_keeps_digits_of_a_solution_that_float32_has_not() -> None:
    matrix, _ = RUNGS["float64"]
    y = torch.tensor([1.0, -1.0])  # along the small eigenvalue, 2^-24
    close(factorize(matrix).solve(y), y * 2.0**24, 1e-6)


def test_a_singular_matrix_that_passes_in_float32_is_not_taken_for_positive() -> None:
    column = torch.linspace(0.1, 1.1, 30).unsqueeze(1)
    matrix = column @ column.mT + 1e-8 * torch.eye(30)  # below what float32 adds to 1
    assert factorize(matrix).rungs != ("as given",)


def test_the_upper_triangle_is_not_read_and_the_matrix_is_kept() -> None:
    matrix = positive(3, 5)
    stale = torch.where(torch.ones(5, 5).tril().bool(), matrix, torch.nan)
    before = stale.clone()
    assert torch.equal(factorize(stale, 0.1).lower, factorize(matrix, 0.1).lower)
    torch.testing.assert_close(stale, before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_raises_by_name(bad: float) -> None:
    matrix = positive(3, 5)
    matrix[1, 2, 0] = bad
    with pytest.raises(ValueError, match=r"G of layer 3 must be finite, 1 of 3 matrices are not"):
        factorize(matrix, name="G of layer 3")


def test_zeros_have_no_size_to_lift_to_but_damping_gives_one() -> None:
    zeros = torch.zeros(2, 3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"head must be positive, 2 matrices are zero .* damping"):
        factorize(zeros, name="head")
    close(factorize(zeros, 0.5).inverse(), 2 * torch.eye(3).double().expand(2, 3, 3))


@pytest.mark.parametrize("damping", [-0.1, float("nan"), float("inf")])
def test_damping_below_zero_or_not_finite_is_an_error(damping: float) -> None:
    with pytest.raises(ValueError, match=r"damping must be a finite number of at least 0, got"):
        factorize(torch.eye(3), damping)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"head has shape \(2, 3\)"):
        factorize(torch.zeros(2, 3), name="head")
    with pytest.raises(ValueError, match=r"solve needs y .* \(3, 3\), got \(4, 2\)"):
        factorize(torch.eye(3)).solve(torch.zeros(4, 2))


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 4, 4)])
def test_empty_matrices_and_batches_give_empty_factors(shape: tuple[int, ...]) -> None:
    found = factorize(torch.zeros(shape))
    assert found.lower.shape == shape
    assert len(found.rungs) == torch.Size(shape[:-2]).numel()


def test_jitter_grows_tenfold_up_to_a_thousandth() -> None:
    assert JITTERS[-1] == 1e-3
    ratios = [b / a for a, b in pairwise(JITTERS)]
    assert ratios == pytest.approx([10.0] * len(ratios))
