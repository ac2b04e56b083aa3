"""Inverse roots by matrix products against eigendecompositions in float64."""

import pytest
import torch
from test_roots import oracle, relative, spectral

from isokron.linalg import inverse_root

solvers = pytest.mark.parametrize("solver", ["newton", "higher"])


# measured: up to 1.3 κ·eps, in float32 less than eigh
@solvers
@pytest.mark.parametrize("root", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("condition", [10.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_are_accurate_up_to_the_condition_number(
    solver: str, root: int, condition: float, dtype: torch.dtype
) -> None:
    matrix, _, _ = spectral(2, n=24, condition=condition)
    computed = inverse_root(matrix.to(dtype), root, solver=solver)
    assert computed.dtype is dtype
    assert torch.equal(computed, computed.mT)
    assert relative(computed, oracle(matrix, root)) < 5 * condition * torch.finfo(dtype).eps


@solvers
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("deficient", ["lift", "relative"])
def test_damping_is_that_of_eigenvalues(
    solver: str, batch: tuple[int, ...], deficient: str
) -> None:
    matrix, _, _ = spectral(*batch)
    for root, damping in ((2, 1e-2), (4, 1e-6)):
        wanted = inverse_root(matrix, root, damping, deficient)
        computed = inverse_root(matrix, root, damping, deficient, solver)
        torch.testing.assert_close(computed, wanted, rtol=1e-9, atol=1e-9)
    singular = torch.zeros(2, 5, 5)
    torch.testing.assert_close(
        inverse_root(singular, 4, 1e-12, deficient, solver),
        inverse_root(singular, 4, 1e-12, deficient),
    )


@solvers
def test_matrices_of_any_scale_beside_each_other_are_as_accurate_as_alone(solver: str) -> None:
    matrix, _, _ = spectral(5, condition=100)
    scales = torch.tensor([1e-36, 1e-30, 1.0, 1e30, 1e36]).double()[:, None, None]
    for root in (2, 4):
        computed = inverse_root((matrix * scales).float(), root, solver=solver).double()
        assert relative(computed * scales ** (1 / root), oracle(matrix, root)) < 1e-5


@solvers
def test_only_the_lower_triangle_is_read_and_half_precision_is_float32(solver: str) -> None:
    matrix, _, _ = spectral(3, condition=10)
    stale = matrix.tril() + torch.full_like(matrix, 1e9).triu(1)
    torch.testing.assert_close(inverse_root(stale, 2, solver=solver), oracle(matrix, 2))
    computed = inverse_root(matrix.bfloat16(), 2, 0.1, solver=solver)
    assert computed.dtype is torch.float32
    assert relative(computed, oracle(matrix, 2, 0.1)) < 0.02
    assert inverse_root(torch.zeros(0, 4, 4), 2, solver=solver).shape == (0, 4, 4)


@solvers
@pytest.mark.parametrize("bad", ["nan", "inf", "singular", "indefinite"])
def test_a_matrix_without_a_root_is_not_finite_and_spoils_no_other(solver: str, bad: str) -> None:
    matrix, _, _ = spectral(3)
    expected = oracle(matrix, 4)
    if bad == "singular":
        matrix[1] = 0
    elif bad == "indefinite":
        matrix[1] = -torch.eye(8)
    else:
        matrix[1, 3, 2] = float(bad)
    computed = inverse_root(matrix, 4, solver=solver)
    assert not computed[1].isfinite().any()
    good = torch.tensor([0, 2])
    torch.testing.assert_close(computed[good], expected[good], rtol=1e-9, atol=1e-9)


@solvers
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_covariance_that_rounding_made_indefinite_has_the_root_of_eigenvalues(
    solver: str, batch: tuple[int, ...]
) -> None:
    gradient = torch.randn(*batch, 16, 1, generator=torch.Generator().manual_seed(0)).float()
    covariance = (gradient @ gradient.mT).bfloat16()
    computed = inverse_root(covariance, 4, 1e-4, "relative", solver)
    assert torch.equal(computed, inverse_root(covariance, 4, 1e-4, "relative"))


@solvers
def test_what_iterations_cannot_take_is_named(solver: str) -> None:
    with pytest.raises(ValueError, match=r"root must be an integer for solver=.* got 2\.5"):
        inverse_root(torch.eye(2), 2.5, solver=solver)
    with pytest.raises(ValueError, match="solver must be 'eigh' for deficient='pseudo'"):
        inverse_root(torch.eye(2), 2, deficient="pseudo", solver=solver)
    with pytest.raises(ValueError, match="solver must be one of"):
        inverse_root(torch.eye(2), 2, solver="qr")


@solvers
def test_the_derivative_is_that_of_eigenvalues(solver: str) -> None:
    matrix = spectral(condition=10)[0].requires_grad_()
    gradients = [
        torch.autograd.grad(inverse_root(matrix, 2, 0.1, solver=by).square().sum(), matrix)[0]
        for by in ("eigh", solver)
    ]
    assert torch.equal(*gradients)
