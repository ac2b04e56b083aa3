"""Gram matrices against the plain product."""

import pytest
import torch

from isokron.linalg import gram, gram_, mirror_, unfold


@pytest.mark.parametrize("size", [1, 7, 8, 9, 30, 33])
@pytest.mark.parametrize("batch", [1, 3])
def test_half_of_a_gram_matrix_mirrored_is_the_whole(
    size: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "LEAST_PANEL", 2)  # so that small matrices have panels
    x = torch.randn(batch, size, 5, dtype=torch.float64)
    start = torch.randn(batch, size, size, dtype=torch.float64)
    start = start + start.mT
    cov = start.clone()
    gram_(cov, x, 0.9, 0.3)
    expected = 0.9 * start + 0.3 * x @ x.mT
    torch.testing.assert_close(cov.tril(), expected.tril())
    torch.testing.assert_close(mirror_(cov), expected)


@pytest.mark.parametrize("size", [1, 7, 8, 30])
def test_symmetric_products_are_the_whole_product(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "LEAST_PANEL", 2)
    x = torch.randn(3, size, 5, dtype=torch.float64)
    a = gram.symmetric_product(x, x.mT)
    torch.testing.assert_close(a, x @ x.mT)
    square = gram.symmetric_product(a, a, a, 0.3, -0.7)
    torch.testing.assert_close(square, 0.3 * a - 0.7 * a @ a)
    torch.testing.assert_close(gram.symmetric_product(a, square), a @ square)


def test_panels_leave_most_of_the_upper_half_alone() -> None:
    cov = torch.zeros(1, 2048, 2048)
    gram_(cov, torch.ones(1, 2048, 1), 1.0, 1.0)
    touched = cov.count_nonzero().item() / cov.numel()
    assert touched == 136 / 256


def test_what_is_mirrored_does_not_look_above_the_diagonal() -> None:
    for size in (6, 700):
        cov = torch.randn(2, size, size)
        expected = cov.tril() + cov.tril(-1).mT
        cov += torch.full((size, size), torch.nan).triu(1)
        torch.testing.assert_close(mirror_(cov), expected)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 4), (2, 3, 4, 5)])
def test_unfolding_puts_one_dimension_first(shape: tuple[int, ...]) -> None:
    x = torch.randn(3, *shape)
    for dim, size in enumerate(shape):
        rows = unfold(x, dim)
        assert rows.shape == (3, size, x[0].numel() // size)
        other = tuple(i + 1 for i in range(len(shape)) if i != dim)
        torch.testing.assert_close(
            (rows @ rows.mT).diagonal(dim1=1, dim2=2),
            x.square().sum(other) if other else x.square(),
        )
