"""Push-through against dense matrices and against plain Woodbury; policies and storage."""

import pytest
import torch
from torch import Tensor

from isokron.operators import (
    gradient_factor,
    push_through,
    storage,
    storage_device,
    store,
    woodbury_policy,
)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def dense(gradients: Tensor, inputs: Tensor, damping: float) -> Tensor:
    """(λI + UUᵀ/T)⁻¹ UĀᵀ/T"""
    u, a, terms = gradients.double(), inputs.double(), gradients.shape[-1]
    eye = torch.eye(u.shape[-2], dtype=torch.float64)
    return torch.linalg.solve(damping * eye + u @ u.mT / terms, u @ a.mT / terms)


def plain_woodbury(gradients: Tensor, inputs: Tensor, damping: float) -> Tensor:
    """[V − U(λT·I + UᵀU)⁻¹UᵀV]/λ, in the dtype of U."""
    terms = gradients.shape[-1]
    v = gradients @ inputs.mT / terms
    small = damping * terms * torch.eye(terms, dtype=v.dtype) + gradients.mT @ gradients
    return (v - gradients @ torch.linalg.solve(small, gradients.mT @ v)) / damping


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("terms", [1, 4, 9])
def test_push_through_is_the_damped_inverse_of_the_gradient(
    batch: tuple[int, ...], terms: int
) -> None:
    u, a = normal(*batch, 7, terms), normal(*batch, 5, terms)
    wanted = dense(u, a, 0.1)
    torch.testing.assert_close(push_through(u, a, 0.1), wanted, rtol=1e-12, atol=1e-12)
    padding = [torch.zeros(*batch, n, 2).double() for n in (7, 5)]
    padded = [torch.cat(pair, -1) for pair in zip((u, a), padding, strict=True)]
    found = push_through(padded[0], padded[1], 0.1, terms)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_push_through_takes_the_columns_of_a_factor() -> None:
    u, a = normal(7, 4), normal(5, 4)
    found = push_through(gradient_factor(u).columns, a / 2, 0.1, terms=1)
    torch.testing.assert_close(found, dense(u, a, 0.1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("damping", "lost"), [(1e-4, 1e-5), (1e-6, 1e-3), (1e-8, 1e-2)])
def test_push_through_keeps_the_digits_that_plain_woodbury_loses(
    damping: float, lost: float
) -> None:
    scales = torch.logspace(0, -3, 64)
    u, a = torch.randn(256, 64) * scales, torch.randn(32, 64)
    wanted = dense(u, a, damping)
    assert relative(plain_woodbury(u.double(), a.double(), damping), wanted) < 1e-6  # it is right
    assert relative(plain_woodbury(u, a, damping), wanted) > lost
    assert relative(push_through(u, a, damping), wanted) < 1e-6
    assert push_through(u, a, damping).dtype is torch.float32


@pytest.mark.parametrize("damping", [1e-4, 1e-6, 1e-8])
def test_push_through_keeps_digits_of_directions_that_columns_share(damping: float) -> None:
    """Scales hidden in a rotation, which UᵀU in float32 would round away: 6e-3 at 1e-6."""
    turn = torch.linalg.qr(torch.randn(64, 64)).Q
    u, a = (torch.randn(256, 64) * torch.logspace(0, -3, 64)) @ turn, torch.randn(32, 64)
    wanted = dense(u, a, damping)
    assert relative(plain_woodbury(u, a, damping), wanted) > 1e-3
    assert relative(push_through(u, a, damping), wanted) < 1e-4


@pytest.mark.parametrize("damping", [0.0, -1.0, float("nan"), float("inf")])
def test_push_through_needs_damping(damping: float) -> None:
    with pytest.raises(ValueError, match=r"damping must be positive, got .*singular"):
        push_through(normal(7, 4), normal(5, 4), damping)


def test_push_through_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"got shapes \(7, 4\) and \(5, 3\)"):
        push_through(normal(7, 4), normal(5, 3), 0.1)
    bad = normal(7, 4).index_fill(1, torch.tensor([2]), torch.nan)
    with pytest.raises(ValueError, match="columns must be finite"):
        push_through(bad, normal(5, 4), 0.1)


# outputs, terms → by policy all, hybrid, auto, none
@pytest.mark.parametrize(
    ("outputs", "terms", "wanted"),
    [
        (1000, 750, [True, False, True, False]),
        (1000, 751, [True, False, False, False]),
        (50257, 8192, [True, True, True, False]),
        (50257, 8193, [True, True, False, False]),
        (16384, 100, [True, False, True, False]),
        (16385, 100, [True, True, True, False]),
    ],
)
def test_policies_choose_by_outputs_and_terms(outputs: int, terms: int, wanted: list[bool]) -> None:
    policies = ("all", "hybrid", "auto", "none")
    assert [woodbury_policy(outputs, terms, policy) for policy in policies] == wanted
    assert woodbury_policy(outputs, terms) is wanted[2]


def test_thresholds_of_a_policy_are_arguments() -> None:
    assert woodbury_policy(100, 90, "auto", rho=0.9)
    assert not woodbury_policy(100, 50, "auto", t_max=49)
    assert woodbury_policy(100, 50, "hybrid", large=99)


def test_policies_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"policy must be one of \('all', .*\), got 'always'"):
        woodbury_policy(10, 5, "always")
    with pytest.raises(ValueError, match=r"terms must be positive, got 0"):
        woodbury_policy(10, 0)
    with pytest.raises(ValueError, match=r"rho must be positive, got -1"):
        woodbury_policy(10, 5, rho=-1)


def test_half_a_gigabyte_stays_on_the_device_and_more_goes_to_the_host() -> None:
    where = {n: storage_device(n, "cuda:1").type for n in (499_999_999, 500_000_000, 500_000_001)}
    assert list(where.values()) == ["cuda", "cuda", "cpu"]
    assert storage_device(10**12, "cuda:1", "device") == torch.device("cuda:1")
    assert storage_device(1, "cuda:1", "host") == torch.device("cpu")
    assert storage_device(2, "cuda", "auto", limit=1) == torch.device("cpu")
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
    here, there = gradient_factor(u, storage="device"), gradient_factor(u, storage="host")
    assert there.columns.is_pinned()
    assert there.inverse(0.1).columns.is_pinned()
    torch.testing.assert_close(there.inverse(0.1).apply(x, -2), here.inverse(0.1).apply(x, -2))


def test_a_matrix_as_it_is_wanted_is_read_in_one_piece_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "PIECE", 1)
    matrix = normal(7, 4)
    parts = list(storage.pieces(matrix, matrix.device, torch.float64))
    assert len(parts) == 1
    assert parts[0][1].data_ptr() == matrix.data_ptr()
