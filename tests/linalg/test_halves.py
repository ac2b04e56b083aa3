"""Half a symmetric matrix holds all of it."""

import pytest
import torch

from isokron.linalg import mirror_
from isokron.linalg.halves import halved, unhalve_


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 130])
def test_a_half_is_a_half_and_makes_the_whole(size: int) -> None:
    root = torch.randn(3, size, size + 1, dtype=torch.float64)
    matrix = root @ root.mT
    noise = torch.full((size, size), torch.nan).triu(1)  # above the diagonal nobody reads
    half = halved(matrix + noise)
    assert half.shape == (3, size * (size + 1) // 2)
    found = mirror_(unhalve_(torch.full_like(matrix, 7.0), half))
    assert torch.equal(found, matrix.tril() + matrix.tril(-1).mT)
