"""LowRank against dense matrices: covariances of gradients, and the Fisher of a softmax."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isokron.linalg import multiply
from isokron.operators import (
    Dense,
    Kron,
    LowRank,
    centered_factor,
    low_rank,
    storage_device,
    store,
    woodbury_policy,
)

BATCHES: list[tuple[int, ...]] = [(), (3,), (2, 3)]
# relative error of a damped inverse in Frobenius norm, its condition number being near 100
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def probabilities(*shape: int) -> Tensor:
    return torch.softmax(2 * normal(*shape), -2)


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def inverse_of_outer(columns: Tensor, damping: float) -> Tensor:
    """(UUᵀ + λI)⁻¹ by the singular values of U, more accurate than those of UUᵀ"""
    left, roots, _ = torch.linalg.svd(columns)
    values = torch.full(left.shape[:-1], damping, dtype=torch.float64)
    values[..., : roots.shape[-1]] += roots**2
    return (left * values.unsqueeze(-2) ** -1) @ left.mT


def close(computed: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Within `tolerance` of the largest entry."""
    scale = expected.abs().max().clamp(min=1e-300)
    torch.testing.assert_close(computed / scale, expected / scale, rtol=0, atol=tolerance)


def relative(computed: Tensor, expected: Tensor) -> float:
    return ((computed.double() - expected).norm() / expected.norm()).item()


def scaled(columns: Tensor, terms: int | None, dtype: torch.dtype | None, storage: str) -> Tensor:
    """U/√T, stored; divided in at least float32, since half precision could underflow."""
    root = (columns.size(-1) if terms is None else terms) ** 0.5
    return store(columns.to(low_rank.wide(columns.dtype)) / root, dtype or columns.dtype, storage)


def gradient_factor(
    gradients: Tensor,
    terms: int | None = None,
    store_dtype: torch.dtype | None = None,
    storage: str = "auto",
) -> LowRank:
    """G = Σ g̃g̃ᵀ/T, as fit keeps it. gradients: [..., o, T]"""
    zeros = torch.zeros((*gradients.shape[:-2], 1), dtype=torch.float64, device=gradients.device)
    return LowRank(zeros, scaled(gradients, terms, store_dtype, storage))


def softmax_factor(
    p: Tensor, terms: int | None = None, store_dtype: torch.dtype | None = None
) -> LowRank:
    """diag(p̄) − PPᵀ/T, as fit keeps it. p: [..., o, T], columns of sum 1"""
    return centered_factor(scaled(p, terms, store_dtype, "auto"))


@pytest.mark.parametrize("batch", BATCHES)
def test_gradients_become_their_mean_outer_product(batch: tuple[int, ...]) -> None:
    gradients = normal(*batch, 7, 4)
    expected = gradients @ gradients.mT / 4
    close(gradient_factor(gradients).to_dense(), expected)
    padded = torch.cat([gradients, torch.zeros(*batch, 7, 3).double()], -1)
    close(gradient_factor(padded, terms=4).to_dense(7), expected)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("damping", [0.3, 1e-3])
@pytest.mark.parametrize("terms", [1, 4, 7, 11])
def test_the_inverse_of_a_gradient_factor_is_that_of_its_dense_matrix(
    batch: tuple[int, ...], damping: float, terms: int
) -> None:
    gradients = normal(*batch, 7, terms)
    expected = inverse_of_outer(gradients / terms**0.5, damping)
    computed = gradient_factor(gradients).inverse(damping)
    close(computed.to_dense(), expected)
    assert computed.columns.shape[-1] <= max(terms, 7)
    for dim, shape in ((-2, (7, 5)), (-1, (5, 7)), (-2, (3, 7, 2))):
        x = normal(*batch, *shape)
        close(computed.apply(x, dim), multiply(x, expected, dim))


def test_zero_and_repeated_columns_change_nothing() -> None:
    columns, zeros = normal(2, 7, 3), torch.zeros(2, 7, 2).double()
    columns[1, :, 2] = columns[1, :, 1]  # the matrices of the batch differ in rank
    factor = gradient_factor(torch.cat([columns, zeros, columns], -1))
    computed = factor.inverse(0.1)
    close(computed.to_dense(), torch.linalg.inv(factor.to_dense() + 0.1 * eye(7)))
    assert computed.columns.shape[-1] == 7
    close(gradient_factor(zeros).inverse(0.1).to_dense(), 10 * eye(7).expand(2, 7, 7))


def test_small_eigenvalues_under_a_large_damping_keep_their_digits() -> None:
    column = normal(7, 1)
    computed = gradient_factor(1e-9 * column).inverse(1e3)
    expected = -(1e3**-2) * 1e-18 * column @ column.mT  # the derivative of 1/λ
    close(computed.sign * computed.columns @ computed.columns.mT, expected)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["gradients", "softmax"])
def test_every_storage_dtype_reaches_its_tolerance(dtype: torch.dtype, kind: str) -> None:
    if kind == "gradients":
        raw = normal(64, 16)
        factor, damping = gradient_factor(raw.float(), store_dtype=dtype), 0.1
        exact = raw @ raw.mT / 16
    else:
        raw = probabilities(64, 16)
        factor, damping = softmax_factor(raw.float(), store_dtype=dtype), 1e-3
        exact = torch.diag(raw.mean(-1)) - raw @ raw.mT / 16
    assert factor.columns.dtype is dtype
    inverse = factor.inverse(damping)
    assert inverse.columns.dtype is torch.float32
    expected = torch.linalg.inv(exact + damping * eye(64))
    assert relative(inverse.to_dense(), expected) < TOLERANCES[dtype]
    x = normal(64, 5).float()
    assert relative(inverse.apply(x, -2), expected @ x.double()) < TOLERANCES[dtype]
    assert relative(factor.apply(x, -2), exact @ x.double()) < TOLERANCES[dtype]
    assert factor.apply(x, -2).dtype is torch.float32
    assert factor.apply(x.bfloat16(), -2).dtype is torch.bfloat16


def test_the_square_root_of_the_terms_keeps_half_precision_from_underflow() -> None:
    gradients = 3e-5 * normal(64, 100)
    factor = gradient_factor(gradients.float(), store_dtype=torch.float16)
    assert relative(factor.to_dense(), gradients @ gradients.mT / 100) < 0.1
    with pytest.raises(ValueError, match=r"float16 cannot represent .* use bfloat16"):
        gradient_factor(1e-4 * gradients.float(), store_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"float16 cannot represent .* use bfloat16"):
        gradient_factor(1e10 * gradients.float(), store_dtype=torch.float16)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("terms", [1, 4, 11])
def test_the_softmax_factor_is_the_fisher_of_the_softmax(
    batch: tuple[int, ...], terms: int
) -> None:
    p = probabilities(*batch, 7, terms)
    expected = torch.diag_embed(p.mean(-1)) - p @ p.mT / terms
    factor = softmax_factor(p)
    close(factor.to_dense(), expected)
    x = normal(*batch, 7, 5)
    close(factor.apply(x, -2), expected @ x)
    padded = torch.cat([p, torch.zeros(*batch, 7, 3).double()], -1)
    close(softmax_factor(padded, terms=terms).to_dense(), expected)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("damping", [0.3, 1e-3])
@pytest.mark.parametrize("terms", [1, 4, 11])
def test_the_inverse_of_a_softmax_factor_is_that_of_its_dense_matrix(
    batch: tuple[int, ...], damping: float, terms: int
) -> None:
    factor = softmax_factor(probabilities(*batch, 7, terms))
    damped = factor.to_dense() + damping * eye(7)
    expected = torch.linalg.inv(damped)
    close(factor.inverse(damping).to_dense(), expected)
    x = normal(*batch, 5, 7)
    close(factor.inverse(damping).apply(x, -1), x @ expected)
    close(factor.inverse(damping).inverse().to_dense(), damped, 1e-11)  # now with the plus


@pytest.mark.parametrize("dtype", [torch.float64, *TOLERANCES])
def test_a_softmax_factor_is_positive_whatever_it_is_stored_in(dtype: torch.dtype) -> None:
    p = probabilities(40, 200)
    factor = softmax_factor(p, store_dtype=dtype)
    dense = torch.diag(factor.diagonal) - factor.columns.double() @ factor.columns.double().mT
    assert dense.sum(-1).abs().max() < 1e-15
    assert torch.linalg.eigvalsh(dense).min() > -1e-15
    expected = torch.linalg.inv(dense + 1e-9 * eye(40))
    assert relative(factor.inverse(1e-9).to_dense(), expected) < 1e-6


def test_the_softmax_factor_says_when_it_is_singular_to_rounding() -> None:
    factor = softmax_factor(probabilities(7, 4))
    for damping in (0.0, 1e-17):
        with pytest.raises(ValueError, match=r"singular to rounding: .* give damping of at least"):
            factor.inverse(damping)
    least = 4 * torch.finfo(torch.float64).eps * factor.diagonal.max().item()
    factor.inverse(2 * least)  # as the message says
    rounded = LowRank(factor.diagonal.float(), factor.columns.float(), -1)
    with pytest.raises(ValueError, match=r"T·eps = 4\.77e-07, got damping 1e-08"):
        rounded.inverse(1e-8)


def test_a_difference_that_is_not_positive_is_an_error_and_not_repaired() -> None:
    p = probabilities(7, 4)
    wrong = LowRank(p.mean(-1), p, -1)  # the square root of the terms forgotten
    with pytest.raises(ValueError, match=r"must be positive, with damping 0\.01 it is not"):
        wrong.inverse(0.01)
    scalar = LowRank(torch.tensor([0.5]).double(), eye(3)[:, :1], -1)
    with pytest.raises(ValueError, match=r"singular: diagonal \+ damping 0\.6 must be above"):
        scalar.inverse(0.1)
    close(scalar.inverse(0.7).to_dense(), torch.diag(1 / normal(3).new_tensor([0.2, 1.2, 1.2])))


def test_without_damping_a_gradient_factor_is_singular() -> None:
    for factor in (gradient_factor(normal(7, 4)), LowRank(torch.zeros(7).double(), normal(7, 4))):
        with pytest.raises(ValueError, match=r"singular: .* must be positive, got 0; give damping"):
            factor.inverse()


@pytest.mark.parametrize("damping", [-0.1, float("nan"), float("inf")])
def test_negative_or_infinite_damping_is_an_error(damping: float) -> None:
    for factor in (gradient_factor(normal(7, 4)), softmax_factor(probabilities(7, 4))):
        with pytest.raises(ValueError, match=r"damping must be a finite number of at least 0"):
            factor.inverse(damping)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_wrong_columns_are_an_error(bad: float) -> None:
    gradients = normal(7, 4)
    gradients[2, 1] = bad
    with pytest.raises(ValueError, match="columns must be finite"):
        gradient_factor(gradients)
    with pytest.raises(ValueError, match="columns must be finite"):
        LowRank(torch.zeros(1).double(), gradients).inverse(0.1)
    with pytest.raises(ValueError, match=r"diagonal must be .* got shapes \(3,\) and \(7, 4\)"):
        LowRank(torch.zeros(3), normal(7, 4))


def test_it_is_a_factor_of_a_kron() -> None:
    gradients, a = normal(7, 4), eye(3) + 0.1
    kron = Kron((gradient_factor(gradients).inverse(0.1), Dense(a)))
    x = normal(7, 3)
    expected = torch.linalg.inv(gradients @ gradients.mT / 4 + 0.1 * eye(7)) @ x
    close(kron.apply(x), expected @ a)


@pytest.mark.parametrize("kind", [gradient_factor, softmax_factor])
def test_reading_in_pieces_gives_what_reading_at_once_gives(
    kind: Callable[[Tensor], LowRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, x = probabilities(3, 50, 4).float(), normal(3, 5, 50)
    single = kind(p)
    expected = [single.apply(x, -1), single.inverse(0.1).apply(x, -1)]
    monkeypatch.setattr(low_rank, "PIECE_BYTES", 3 * 4 * 8 * 7)  # seven rows
    assert [start for start, _ in low_rank.pieces(p, p.device, torch.float64)][:3] == [0, 7, 14]
    cut = kind(p)
    close(cut.diagonal, single.diagonal)
    close(cut.apply(x, -1), expected[0])
    close(cut.inverse(0.1).apply(x, -1), expected[1], 1e-6)  # whose columns are float32


def test_the_dense_matrix_is_never_formed() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(result)
            largest = max([largest, *(t.numel() for t in leaves if torch.is_tensor(t))])
            return result

    n, terms = 200, 5
    p, x = probabilities(n, terms), normal(n, 3)
    with Watch():
        for factor in (gradient_factor(p), softmax_factor(p)):
            factor.apply(x, -2)
            factor.inverse(0.1).apply(x, -2)
        gradient_factor(p).inverse(0.1).apply(x, -2)
    assert largest == n * terms


# outputs, terms → by policy all, hybrid, auto, none
@pytest.mark.parametrize(
    ("outputs", "terms", "expected"),
    [
        (1000, 750, [True, False, True, False]),
        (1000, 751, [True, False, False, False]),
        (50257, 8192, [True, True, True, False]),
        (50257, 8193, [True, True, False, False]),
        (16384, 100, [True, False, True, False]),
        (16385, 100, [True, True, True, False]),
    ],
)
def test_policies_choose_by_outputs_and_terms(
    outputs: int, terms: int, expected: list[bool]
) -> None:
    policies = ("all", "hybrid", "auto", "dense")
    assert [woodbury_policy(outputs, terms, policy) for policy in policies] == expected
    assert woodbury_policy(outputs, terms) is expected[2]


def test_thresholds_of_a_policy_are_arguments() -> None:
    assert woodbury_policy(100, 90, "auto", rho=0.9)
    assert not woodbury_policy(100, 50, "auto", t_max=49)
    with pytest.raises(ValueError, match=r"policy must be one of \('all', .*\), got 'always'"):
        woodbury_policy(10, 5, "always")
    with pytest.raises(ValueError, match=r"rho must be positive, got -1"):
        woodbury_policy(10, 5, rho=-1)


def test_half_a_gigabyte_stays_on_the_device_and_more_goes_to_the_host() -> None:
    where = {n: storage_device(n, "cuda:1").type for n in (499_999_999, 500_000_000, 500_000_001)}
    assert list(where.values()) == ["cuda", "cuda", "cpu"]
    assert storage_device(10**12, "cuda:1", "device") == torch.device("cuda:1")
    assert storage_device(1, "cuda:1", "host") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"storage must be one of .*, got 'disk'"):
        storage_device(1, "cpu", "disk")


def test_storing_rounds_to_the_dtype_and_copies_nothing_else() -> None:
    matrix = normal(7, 4)
    assert store(matrix) is matrix
    assert store(matrix, storage="host") is matrix
    assert store(matrix, torch.bfloat16).equal(matrix.bfloat16())
    assert not store(matrix, storage="host").is_pinned()
    with pytest.raises(ValueError, match=r"store_dtype must be one of .*, got torch\.int8"):
        store(matrix, torch.int8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is CUDA's")
def test_on_the_host_columns_are_pinned_and_act_as_on_the_device() -> None:
    u, x = normal(64, 8).cuda(), normal(64, 3).cuda()
    device, host = (gradient_factor(u, storage=storage) for storage in ("device", "host"))
    assert host.columns.is_pinned()
    assert host.inverse(0.1).columns.is_pinned()
    torch.testing.assert_close(host.inverse(0.1).apply(x, -2), device.inverse(0.1).apply(x, -2))


def test_a_matrix_that_needs_no_conversion_is_read_in_one_piece_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(low_rank, "PIECE_BYTES", 1)
    matrix = normal(7, 4)
    parts = list(low_rank.pieces(matrix, matrix.device, torch.float64))
    assert len(parts) == 1
    assert parts[0][1].data_ptr() == matrix.data_ptr()
