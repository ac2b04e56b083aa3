import pytest
import torch

from isokron.linalg import norm_bound


@pytest.mark.parametrize("sign", [1, -1], ids=["symmetric", "skew"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_bound_is_close_to_the_spectral_norm_and_not_above_it(sign: int, size: float) -> None:
    root = torch.randn(4, 12, 12, dtype=torch.float64)
    matrix = root + sign * root.mT
    matrix[3] = 0
    norm = torch.linalg.matrix_norm(matrix, 2)
    scaled = (size * matrix).float()
    bound = norm_bound(scaled, scaled.abs().amax((1, 2)), torch.randn(4, 12)).double() / size
    assert (bound <= norm * (1 + 1e-5)).all()
    assert (bound >= 0.8 * norm).all()


def test_probes_find_an_eigenvector_that_the_largest_row_misses() -> None:
    matrix = torch.block_diag(torch.ones(1, 1), torch.full((4, 4), 0.45))[None]
    probes = torch.stack([torch.zeros(5), torch.ones(5)])
    assert norm_bound(matrix, torch.ones(1), probes[:1]).item() == pytest.approx(1.0)
    assert norm_bound(matrix, torch.ones(1), probes).item() == pytest.approx(1.8, rel=1e-3)
