"""Eigendecompositions with their retries, and bases that track a matrix."""

import logging
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isokron.linalg import eigenbasis, eigh, follow, lift, offdiagonal
from isokron.linalg.eigen import JITTERS, cholesky_q, householder_q

torch_eigh = torch.linalg.eigh


def positive(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    root = torch.randn(*shape, shape[-1], dtype=dtype)
    return root @ root.mT


def rebuilt(values: Tensor, vectors: Tensor) -> Tensor:
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def inject(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Tensor], bool]) -> list[Tensor]:
    """Make torch.linalg.eigh raise where `fails(matrix)`; returns its arguments."""
    calls: list[Tensor] = []

    def faulty(matrix: Tensor, UPLO: str = "L") -> tuple[Tensor, Tensor]:
        calls.append(matrix)
        if fails(matrix):
            raise torch.linalg.LinAlgError("injected")
        return torch_eigh(matrix, UPLO=UPLO)

    monkeypatch.setattr(torch.linalg, "eigh", faulty)
    return calls


def mark_(matrix: Tensor) -> None:
    """A zero in the corner, which neither scaling nor jitter changes."""
    matrix[-1, 0] = matrix[0, -1] = 0


def is_marked(matrix: Tensor) -> bool:
    return bool((matrix[..., -1, 0] == 0).any())


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_values_and_vectors_rebuild_the_matrix(batch: tuple[int, ...], n: int) -> None:
    matrix = positive(*batch, n)
    values, vectors = eigh(matrix)
    assert values.shape == matrix.shape[:-1]
    assert (values.diff(dim=-1) >= 0).all()
    torch.testing.assert_close(rebuilt(values, vectors), matrix, rtol=1e-10, atol=1e-10)
    eye = torch.eye(n, dtype=torch.float64).expand_as(matrix)
    torch.testing.assert_close(vectors.mT @ vectors, eye, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 4, 4), (2, 0, 4, 4)])
def test_empty_matrices_and_batches_give_empty_results(shape: tuple[int, ...]) -> None:
    values, vectors = eigh(torch.zeros(shape))
    assert values.shape == shape[:-1]
    assert vectors.shape == shape


def test_the_upper_triangle_is_not_read() -> None:
    matrix = positive(3, 5)
    expected = eigh(matrix)
    for garbage in (-7.0, 1e300, torch.nan, torch.inf):
        stale = torch.where(torch.ones_like(matrix).tril().bool(), matrix, garbage)
        assert all(map(torch.equal, eigh(stale), expected))


def test_matrices_of_any_scale_in_one_batch_are_as_accurate_as_those_of_scale_one() -> None:
    scales = torch.tensor([1e-36, 1e-30, 1.0, 1e30, 1e36], dtype=torch.float64)
    matrix = positive(5, 6)
    values, vectors = eigh((matrix * scales[:, None, None]).float())
    values = values.double() / scales[:, None]
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rebuilt(values, vectors.double()), matrix, rtol=1e-5, atol=1e-5)


def test_singular_and_zero_matrices_have_zero_eigenvalues() -> None:
    column = torch.randn(5, 1, dtype=torch.float64)
    values, vectors = eigh(torch.stack([column @ column.mT, torch.zeros(5, 5).double()]))
    torch.testing.assert_close(values[0, -1], column.square().sum())
    assert values[0, :-1].abs().max() < 1e-12
    assert torch.equal(values[1], torch.zeros(5, dtype=torch.float64))
    assert vectors.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_and_returned_in_float32(dtype: torch.dtype) -> None:
    matrix = positive(5).to(dtype)
    values, vectors = eigh(matrix)
    assert values.dtype is vectors.dtype is torch.float32
    wanted = matrix.float().tril() + matrix.float().tril(-1).mT
    torch.testing.assert_close(rebuilt(values, vectors), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_matrix_that_is_not_finite_gives_nan_and_spoils_no_other(bad: float) -> None:
    matrix = positive(2, 3, 5)
    expected = eigh(matrix)
    matrix[1, 2, 4, 0] = bad
    values, vectors = eigh(matrix)
    assert values[1, 2].isnan().all()
    assert vectors[1, 2].isnan().all()
    good = torch.ones(2, 3, dtype=torch.bool)
    good[1, 2] = False
    assert torch.equal(values[good], expected[0][good])
    assert torch.equal(vectors[good], expected[1][good])


def test_backends_never_see_a_matrix_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = inject(monkeypatch, lambda matrix: False)
    values, _ = eigh(torch.full((2, 3, 3), torch.nan))
    assert values.isnan().all()
    assert all(matrix.isfinite().all() for matrix in calls)


def test_a_good_batch_takes_one_call_and_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = inject(monkeypatch, lambda matrix: False)
    eigh(positive(2, 3, 5))
    assert len(calls) == 1
    assert not caplog.records


def test_a_batch_that_fails_is_retried_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = positive(2, 3, 5, dtype=torch.float32)
    values, vectors = eigh(matrix)
    calls = inject(monkeypatch, lambda sample: sample.ndim > 2)
    again = eigh(matrix)
    torch.testing.assert_close(again[0], values)
    torch.testing.assert_close(rebuilt(*again), rebuilt(values, vectors))
    assert len(calls) == 1 + 6
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 6
    assert "matrix 6 of 6 decomposed one at a time" in caplog.text


def test_only_the_matrix_that_fails_goes_on_to_float64(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = positive(3, 5, dtype=torch.float32)
    mark_(matrix[1])
    calls = inject(monkeypatch, lambda sample: sample.dtype is torch.float32 and is_marked(sample))
    values, vectors = eigh(matrix)
    assert values.dtype is vectors.dtype is torch.float32
    torch.testing.assert_close(rebuilt(values, vectors), matrix, rtol=1e-4, atol=1e-4)
    assert [sample.dtype for sample in calls].count(torch.float64) == 1
    assert "matrix 2 of 3 decomposed in float64" in caplog.text


@pytest.mark.parametrize("retry", range(len(JITTERS)))
def test_jitter_is_tried_in_turn_and_taken_off_the_eigenvalues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, retry: int
) -> None:
    matrix = positive(4)
    wanted, _ = eigh(matrix)
    calls = inject(monkeypatch, lambda sample: len(calls) <= retry + 1)
    values, vectors = eigh(matrix)
    torch.testing.assert_close(values, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rebuilt(values, vectors), matrix, rtol=1e-10, atol=1e-10)
    jitter = (calls[-1] - calls[0]).diagonal() / calls[0].diagonal().mean()
    torch.testing.assert_close(jitter, torch.full_like(jitter, JITTERS[retry]), rtol=1e-6, atol=0)
    assert f"in float64 with jitter {JITTERS[retry]:g}" in caplog.text


def test_a_matrix_that_always_fails_is_nan_and_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = positive(4, 5)
    mark_(matrix[2])
    values, _ = eigh(matrix)
    inject(monkeypatch, is_marked)
    again_values, again_vectors = eigh(matrix)
    assert again_values[2].isnan().all()
    assert again_vectors[2].isnan().all()
    for i in (0, 1, 3):
        torch.testing.assert_close(again_values[i], values[i])
        torch.testing.assert_close(rebuilt(again_values[i], again_vectors[i]), matrix[i])
    assert "matrix 3 of 4 failed every retry" in caplog.text


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [RuntimeError("out of memory")]

    def broken(matrix: Tensor, UPLO: str = "L") -> tuple[Tensor, Tensor]:
        if errors:
            raise errors.pop()
        return torch_eigh(matrix, UPLO=UPLO)

    monkeypatch.setattr(torch.linalg, "eigh", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        eigh(positive(3))


def test_what_is_not_square_is_named() -> None:
    for shape in [(3,), (2, 3), (4, 2, 3)]:
        with pytest.raises(ValueError, match=r"eigh needs matrices \[\.\.\., n, n\]"):
            eigh(torch.ones(shape))


def test_a_result_that_is_not_finite_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(matrix: Tensor, UPLO: str = "L") -> tuple[Tensor, Tensor]:
        values, vectors = torch_eigh(matrix, UPLO=UPLO)
        bad = matrix.dtype is torch.float32
        return values, torch.full_like(vectors, torch.nan) if bad else vectors

    matrix = positive(3, 5, dtype=torch.float32)
    monkeypatch.setattr(torch.linalg, "eigh", silent)
    torch.testing.assert_close(rebuilt(*eigh(matrix)), matrix, rtol=1e-4, atol=1e-4)


def test_orthogonal_iteration_converges_to_the_descending_eigenbasis() -> None:
    matrix = positive(3, 6)
    matrix[2] = 0  # keeps its basis
    start = torch.linalg.qr(torch.randn_like(matrix)).Q
    basis = start
    for _ in range(3000):
        basis = follow(matrix, basis)
    assert torch.equal(basis[2], start[2])
    assert offdiagonal(matrix, start)[:2].min() > 0.1
    assert offdiagonal(matrix, basis).max() < 1e-6
    overlap = (basis.mT @ eigenbasis(matrix)).abs()[:2]
    torch.testing.assert_close(overlap, torch.eye(6).double().expand(2, 6, 6), atol=1e-5, rtol=0)


def test_lifted_eigenvalues_are_at_least_the_largest_over_the_condition() -> None:
    values = torch.tensor([[1e-9, 0.05, 0.2, 2.0], [1.0] * 4, [-1e-9, 0.0, 0.0, 0.0]])
    raised, count = lift(values, 10.0)
    assert raised.tolist() == torch.tensor([[0.2, 0.2, 0.2, 2.0], [1.0] * 4, [0.0] * 4]).tolist()
    assert count.tolist() == [2, 0, 1]
    for condition in (0.5, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_condition must be at least 1, got"):
            lift(values, condition)


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_basis_by_products_is_that_of_reflections(
    condition: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a basis that is nearly one of eigenvectors, as a refresh finds it."""
    size = 48
    exact = torch.linalg.qr(torch.randn(3, size, size, dtype=torch.float64)).Q
    values = torch.logspace(0, -math.log10(condition), size, dtype=torch.float64)
    matrix = (exact * values) @ exact.mT
    old = torch.linalg.qr(exact + 0.02 * torch.randn_like(exact) / size**0.5).Q
    eps, eye, wanted = torch.finfo(dtype).eps, torch.eye(size), follow(matrix, old)
    plain = follow(matrix.to(dtype), old.to(dtype)).double()
    if dtype is torch.float32:  # where products are enough
        monkeypatch.delattr("isokron.linalg.eigen.householder_q")
    basis = follow(matrix.to(dtype), old.to(dtype), by="cholesky").double()
    assert (basis.mT @ basis - eye).abs().max() < 30 * eps
    error, least = (((q.mT @ wanted).abs() - eye).abs().max() for q in (basis, plain))
    assert error < 2 * least + 30 * eps


def test_columns_that_products_cannot_separate_go_to_reflections() -> None:
    good = torch.linalg.qr(torch.randn(6, 6)).Q
    alike = 1e-5 * good + 1  # all columns point almost in one direction
    rank = torch.cat([good[:, :4], torch.zeros(6, 2)], 1)
    columns = torch.stack([good, alike, rank])
    basis = cholesky_q(columns)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6).expand(3, 6, 6), atol=2e-6, rtol=0)
    assert torch.equal(basis[1:], householder_q(columns)[1:])
    assert not torch.equal(basis[0], householder_q(columns)[0])


def test_an_unknown_way_to_a_basis_is_named() -> None:
    with pytest.raises(ValueError, match="by must be 'qr' or 'cholesky', got 'gram'"):
        follow(torch.eye(2), torch.eye(2), by="gram")
