"""Cholesky factors against dense matrices, with a matrix for every fallback."""

import logging

import pytest
import torch
from torch import Tensor

from isokron.linalg import factorize
from isokron.linalg.cholesky import FLOOR


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def positive(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    return (root @ root.mT / shape[-1] + 0.1 * eye(shape[-1])).to(dtype)


def indefinite(n: int = 4) -> Tensor:
    """Eigenvalues 1, …, 1 and −0.5 in a random basis."""
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    return eye(n) - 1.5 * basis[:, :1] @ basis[:, :1].mT


def product(lower: Tensor) -> Tensor:
    return lower.double() @ lower.double().mT


def close(computed: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance)


# a matrix for each fallback, and its jitter
ALMOST_ONE = 1 - 2.0**-24
FALLBACKS: dict[str, tuple[Tensor, float]] = {
    "as given": (torch.eye(3), 0.0),
    "float64": (torch.tensor([[1.0, ALMOST_ONE], [ALMOST_ONE, 1.0]]), 0.0),
    "jitter 1e-08": (torch.ones(3, 3, dtype=torch.float64), 1e-8),
    "jitter 1e-05": (torch.ones(3, 3).double() - 2e-6 * eye(3), 1e-5),
    "jitter 0.001": (torch.diag(torch.tensor([1.0, 1.0, -5e-4])), 1e-3),
}


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_product_of_the_factor_is_the_damped_matrix(
    batch: tuple[int, ...], damping: float, dtype: torch.dtype
) -> None:
    matrix = positive(*batch, 5, dtype=dtype)
    lower, rungs = factorize(matrix, damping)
    assert lower.dtype is torch.promote_types(dtype, torch.float32)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    triangle = matrix.double().tril()
    close(product(lower), triangle + triangle.tril(-1).mT + damping * eye(5), tolerance)
    assert rungs == ("as given",) * torch.Size(batch).numel()


@pytest.mark.parametrize("rung", FALLBACKS)
def test_a_matrix_uses_the_first_fallback_that_is_enough(rung: str) -> None:
    matrix, jitter = FALLBACKS[rung]
    lower, rungs = factorize(matrix)
    assert rungs == (rung,)
    wide = matrix.double()
    close(product(lower), wide + jitter * wide.diagonal().abs().mean() * eye(len(wide)), 1e-15)
    assert lower.dtype is (matrix.dtype if rung == "as given" else torch.float64)


def test_the_eigenvalues_of_an_indefinite_matrix_are_clamped() -> None:
    matrix = indefinite()
    lower, rungs = factorize(matrix)
    assert rungs == ("eigh",)
    values, basis = torch.linalg.eigh(matrix)
    close(product(lower), (basis * values.clamp(min=FLOOR * values.max())) @ basis.mT)
    assert torch.equal(lower, lower.tril())
    assert (lower.diagonal() > 0).all()


def test_one_bad_matrix_of_a_batch_changes_no_other(caplog: pytest.LogCaptureFixture) -> None:
    good, singular, bad = positive(4), torch.ones(4, 4).double(), indefinite()
    batch = torch.stack([good, singular, bad, good]).view(2, 2, 4, 4)
    with caplog.at_level(logging.WARNING):
        lower, rungs = factorize(batch, name="layer 3")
    assert rungs == ("as given", "jitter 1e-08", "eigh", "as given")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"Cholesky of layer 3: 1 of 4 by {rung}" for rung in rungs[1:3]]
    assert torch.equal(lower[0, 0], factorize(good).lower)
    assert torch.equal(lower[1, 0], factorize(bad).lower)


def test_a_singular_matrix_that_passes_in_float32_is_not_accepted_as_positive() -> None:
    eps = torch.finfo(torch.float32).eps
    matrix = torch.tensor([[1.0, 1.0], [1.0, 1.0 + eps]])  # its last pivot is only rounding
    assert torch.linalg.cholesky_ex(matrix).info == 0
    assert factorize(matrix).rungs == ("float64",)


def test_the_upper_triangle_is_not_read_and_the_matrix_is_not_changed() -> None:
    matrix = positive(3, 5)
    stale = torch.where(torch.ones(5, 5).tril().bool(), matrix, torch.nan)
    before = stale.clone()
    assert torch.equal(factorize(stale, 0.1).lower, factorize(matrix, 0.1).lower)
    torch.testing.assert_close(stale, before, equal_nan=True, rtol=0, atol=0)


def test_a_zero_matrix_needs_damping() -> None:
    zeros = torch.zeros(2, 3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"head must be positive, 2 matrices are zero .* damping"):
        factorize(zeros, name="head")
    close(product(factorize(zeros, 0.5).lower), 0.5 * eye(3).expand(2, 3, 3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_raise_by_name(bad: float) -> None:
    matrix = positive(3, 5)
    matrix[1, 2, 0] = bad
    with pytest.raises(ValueError, match=r"G of layer 3 must be finite, 1 of 3 matrices are not"):
        factorize(matrix, name="G of layer 3")


@pytest.mark.parametrize("damping", [-0.1, float("nan"), float("inf")])
def test_wrong_arguments_are_named(damping: float) -> None:
    with pytest.raises(ValueError, match=r"damping must be a finite number of at least 0, got"):
        factorize(torch.eye(3), damping)
    with pytest.raises(ValueError, match=r"head has shape \(2, 3\)"):
        factorize(torch.zeros(2, 3), name="head")


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 4, 4)])
def test_empty_matrices_and_batches_give_empty_factors(shape: tuple[int, ...]) -> None:
    lower, rungs = factorize(torch.zeros(shape))
    assert lower.shape == shape
    assert len(rungs) == torch.Size(shape[:-2]).numel()
