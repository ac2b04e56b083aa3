"""Symmetric products and packed triangles against plain products."""

import pytest
import torch

from isokron.linalg import (
    gram_,
    halved,
    mirror_,
    products,
    symmetric_product,
    unfold,
    unhalve_,
)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 30, 33])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_triangle_of_a_gram_matrix_mirrored_is_the_full_product(
    size: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MIN_PANEL", 2)  # so that small matrices have panels
    x = torch.randn(batch, size, 5, dtype=torch.float64)
    start = torch.randn(batch, size, size, dtype=torch.float64)
    start = start + start.mT
    cov = start.clone()
    gram_(cov, x, 0.9, 0.3)
    expected = 0.9 * start + 0.3 * x @ x.mT
    torch.testing.assert_close(cov.tril(), expected.tril())
    torch.testing.assert_close(mirror_(cov), expected)


@pytest.mark.parametrize("size", [1, 7, 8, 30])
def test_symmetric_products_are_the_full_product(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MIN_PANEL", 2)
    x = torch.randn(3, size, 5, dtype=torch.float64)
    a = symmetric_product(x, x.mT)
    torch.testing.assert_close(a, x @ x.mT)
    square = symmetric_product(a, a, a, 0.3, -0.7)
    torch.testing.assert_close(square, 0.3 * a - 0.7 * a @ a)
    torch.testing.assert_close(symmetric_product(a, square), a @ square)


def test_panels_skip_most_of_the_upper_triangle() -> None:
    cov = torch.zeros(1, 2048, 2048)
    gram_(cov, torch.ones(1, 2048, 1), 1.0, 1.0)
    assert cov.count_nonzero().item() / cov.numel() == 136 / 256


def test_mirroring_does_not_read_the_upper_triangle() -> None:
    for size in (6, 700):
        cov = torch.randn(2, size, size)
        expected = cov.tril() + cov.tril(-1).mT
        cov += torch.full((size, size), torch.nan).triu(1)
        torch.testing.assert_close(mirror_(cov), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 130])
def test_a_packed_triangle_holds_all_of_a_symmetric_matrix(size: int) -> None:
    root = torch.randn(3, size, size + 1, dtype=torch.float64)
    matrix = root @ root.mT
    stale = torch.full((size, size), torch.nan).triu(1)
    half = halved(matrix + stale)
    assert size < 130 or half.shape[1] < 0.54 * size**2
    unpacked = mirror_(unhalve_(torch.full_like(matrix, 7.0), half))
    assert torch.equal(unpacked, matrix.tril() + matrix.tril(-1).mT)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 4), (2, 3, 4, 5)])
def test_unfolding_puts_one_dimension_first(shape: tuple[int, ...]) -> None:
    x = torch.randn(3, *shape)
    for dim, size in enumerate(shape):
        rows = unfold(x, dim)
        expected = x.movedim(dim + 1, 1).reshape(3, size, -1)
        torch.testing.assert_close(rows @ rows.mT, expected @ expected.mT)
        assert rows.shape == expected.shape
