"""Inverse roots against eigendecompositions in float64."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from isokron.linalg import inverse_power, inverse_root


def spectral(*batch: int, n: int = 8, condition: float = 1e3) -> tuple[Tensor, Tensor, Tensor]:
    """Random symmetric matrices with eigenvalues from 1 down to 1/condition, in float64."""
    basis = torch.linalg.qr(torch.randn(*batch, n, n, dtype=torch.float64)).Q
    values = torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)
    values = values.expand(*batch, n)
    return (basis * values.unsqueeze(-2)) @ basis.mT, values, basis


def oracle(matrix: Tensor, root: float, damping: float = 0.0) -> Tensor:
    values, basis = torch.linalg.eigh(matrix.double())
    return (basis * (values + damping).unsqueeze(-2) ** (-1 / root)) @ basis.mT


def relative(computed: Tensor, expected: Tensor) -> float:
    gap = torch.linalg.matrix_norm(computed.double() - expected) / torch.linalg.matrix_norm(
        expected
    )
    return gap.max().item()


@pytest.mark.parametrize("root", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("damping", [0.0, 1e-2])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_the_damped_inverse_root_equals_that_of_float64_eigenvalues(
    root: int, damping: float, batch: tuple[int, ...]
) -> None:
    matrix, _, _ = spectral(*batch)
    computed = inverse_root(matrix, root, damping)
    assert computed.shape == matrix.shape
    torch.testing.assert_close(computed, oracle(matrix, root, damping), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("root", [0.5, 1.5, 2.7])
def test_eigh_takes_any_positive_root(root: float) -> None:
    matrix, _, _ = spectral(condition=10)
    torch.testing.assert_close(
        inverse_root(matrix, root), oracle(matrix, root), rtol=1e-10, atol=1e-10
    )


# measured for n = 64, root 1: about κ·eps
@pytest.mark.parametrize("root", [1, 2, 4])
@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_float32_is_accurate_up_to_the_condition_number(root: int, condition: float) -> None:
    matrix, _, _ = spectral(4, n=64, condition=condition)
    computed = inverse_root(matrix.float(), root)
    assert computed.dtype is torch.float32
    bound = 10 * condition * torch.finfo(torch.float32).eps
    assert relative(computed, oracle(matrix, root)) < bound


def test_a_rank_one_matrix_with_damping_is_accurate() -> None:
    column = torch.randn(3, 16, 1, dtype=torch.float64)
    matrix = column @ column.mT
    computed = inverse_root(matrix.float(), 4, 1e-3)
    assert relative(computed, oracle(matrix, 4, 1e-3)) < 1e-2


@pytest.mark.parametrize("root", [2, 4])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_extreme_scales_are_as_accurate_as_scale_one(root: int, scale: float) -> None:
    matrix, _, _ = spectral(2, condition=100)
    matrix = torch.stack([matrix[0] * scale, matrix[1]])  # beside one of scale one
    computed = inverse_root(matrix.float(), root)
    assert relative(computed, oracle(matrix, root)) < 1e-5


def test_damping_alone_is_the_root_of_a_zero_matrix() -> None:
    computed = inverse_root(torch.zeros(2, 5, 5), 4, 1e-12)
    torch.testing.assert_close(computed, 1e3 * torch.eye(5).expand(2, 5, 5))


def test_only_the_lower_triangle_counts() -> None:
    matrix, _, _ = spectral(3)
    stale = matrix.tril() + torch.full_like(matrix, 1e9).triu(1)
    assert torch.equal(inverse_root(stale, 2), inverse_root(matrix.tril(), 2))
    torch.testing.assert_close(inverse_root(stale, 2), oracle(matrix, 2))


@pytest.mark.parametrize("bad", ["nan", "inf", "singular", "indefinite"])
def test_a_matrix_without_a_root_is_nan_and_spoils_no_other(bad: str) -> None:
    matrix, _, _ = spectral(3)
    expected = oracle(matrix, 4)
    if bad == "singular":
        matrix[1] = 0
    elif bad == "indefinite":
        matrix[1] = -torch.eye(8)
    else:
        matrix[1, 3, 2] = float(bad)
    computed = inverse_root(matrix, 4)
    assert not computed[1].isfinite().any()
    good = torch.tensor([0, 2])
    torch.testing.assert_close(computed[good], expected[good], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 4, 4)])
def test_empty_matrices_and_batches_stay_empty(shape: tuple[int, ...]) -> None:
    assert inverse_root(torch.zeros(shape), 2).shape == shape


def test_eigenvalues_below_zero_are_lifted_by_a_shift() -> None:
    values = torch.tensor([[-0.25, 0.0, 1.0], [0.5, 1.0, 2.0]], dtype=torch.float64)
    lifted = torch.tensor([[0.0, 0.25, 1.25], [0.5, 1.0, 2.0]], dtype=torch.float64) + 0.1
    torch.testing.assert_close(inverse_power(values, 2, 0.1), lifted**-0.5)
    basis = torch.linalg.qr(torch.randn(2, 3, 3, dtype=torch.float64)).Q
    computed = inverse_root((basis * values[:, None]) @ basis.mT, 2, 0.1)
    torch.testing.assert_close(computed, (basis * lifted[:, None] ** -0.5) @ basis.mT)


@pytest.mark.parametrize("root", [1, 2, 4])
def test_pseudo_inverse_leaves_the_null_space_at_zero(root: int) -> None:
    columns = torch.randn(3, 6, 2, dtype=torch.float64)
    matrix = columns @ columns.mT
    computed = inverse_root(matrix, root, deficient="pseudo")
    power = torch.linalg.matrix_power(computed, root)
    torch.testing.assert_close(power, torch.linalg.pinv(matrix, hermitian=True))
    assert inverse_root(torch.zeros(4, 4), root, deficient="pseudo").eq(0).all()


def test_pseudo_inverse_drops_eigenvalues_at_rounding_level() -> None:
    eps = 5 * torch.finfo(torch.float32).eps
    values = torch.tensor([-1.0, 0.0, 0.9 * eps, 1.1 * eps, 1.0])
    expected = torch.tensor([0.0, 0.0, 0.0, 1 / (1.1 * eps), 1.0])
    torch.testing.assert_close(inverse_power(values, 1, deficient="pseudo"), expected)


@pytest.mark.parametrize("deficient", ["lift", "pseudo"])
def test_nan_eigenvalues_stay_nan(deficient: str) -> None:
    values = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]])
    computed = inverse_power(values, 2, deficient=deficient)
    assert computed.isnan().tolist() == [[False, False], [True, True]]


def test_half_precision_roots_are_float32() -> None:
    matrix, _, _ = spectral(condition=10)
    computed = inverse_root(matrix.bfloat16(), 2, 0.1)
    assert computed.dtype is torch.float32
    assert relative(computed, oracle(matrix, 2, 0.1)) < 0.02


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deficient": "drop"}, "deficient must be one of"),
        ({"root": 0}, "root must be a positive number, got 0"),
        ({"root": -2}, "root must be a positive number, got -2"),
        ({"root": math.nan}, "root must be a positive number, got nan"),
        ({"root": math.inf}, "root must be a positive number, got inf"),
        ({"damping": -1.0}, "damping must be a finite number of at least 0, got -1.0"),
        ({"damping": math.nan}, "damping must be a finite number"),
        ({"damping": 0.1, "deficient": "pseudo"}, "damping must be 0 .* got 0.1; use"),
    ],
)
def test_wrong_root_arguments_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inverse_root(torch.eye(2), **{"root": 2, **settings})  # type: ignore[arg-type]


def test_a_root_of_what_is_not_square_is_named() -> None:
    with pytest.raises(ValueError, match=r"inverse_root needs matrices \[\.\.\., n, n\]"):
        inverse_root(torch.ones(2, 3), 2)


@pytest.mark.parametrize("deficient", ["relative", "lift", "pseudo"])
@pytest.mark.parametrize("values", [[0.3, 1.0, 2.0, 5.0], [1.0, 1.0, 1.0, 3.0], [0.01, 0.01, 1, 1]])
def test_the_derivative_is_that_of_finite_differences(values: list[float], deficient: str) -> None:
    """Also where eigenvalues are equal, at which eigenvectors have no derivative."""
    basis = torch.linalg.qr(torch.randn(2, 4, 4, dtype=torch.float64))[0]
    matrix = (basis * torch.tensor(values, dtype=torch.float64)) @ basis.mT
    damping = 0.0 if deficient == "pseudo" else 0.1
    root = partial(inverse_root, root=3.0, damping=damping, deficient=deficient)
    lower = matrix.tril().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: root(x + x.tril(-1).mT), lower, atol=1e-6)
    torch.testing.assert_close(root(lower).detach(), root(matrix))


def test_the_derivative_of_a_pseudo_inverse_keeps_the_rank() -> None:
    tall = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    root = partial(inverse_root, root=2.0, deficient="pseudo")
    assert torch.autograd.gradcheck(lambda x: root(x @ x.mT), tall)
