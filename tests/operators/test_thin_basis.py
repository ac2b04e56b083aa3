"""Eigenvalues on a thin basis and its complement, against the dense matrix in float64."""

import pytest
import torch
from torch import Tensor

from isokron.operators import KronEigen, LowRank
from isokron.operators.kron import is_thin, with_outside

B, O, R, I = 2, 7, 3, 4  # noqa: E741


def operator(zeros: int = 0) -> tuple[KronEigen, Tensor]:
    """With a thin basis of which some columns are 0, and its dense matrix from the definition."""
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(B, O, R, dtype=torch.float64)).Q
    left[:, :, :zeros] = 0.0
    right = torch.linalg.qr(torch.randn(B, I, I, dtype=torch.float64)).Q
    outside = torch.rand(B, 1, I, dtype=torch.float64) + 0.1
    inside = torch.rand(B, R, I, dtype=torch.float64) + 1.0
    inside[:, :zeros] = outside
    dense = torch.zeros(B, O * I, O * I, dtype=torch.float64)
    for b in range(B):
        beyond = torch.eye(O).double() - left[b] @ left[b].mT
        for j in range(I):
            column = right[b, :, j].outer(right[b, :, j])
            dense[b] += outside[b, 0, j] * torch.kron(beyond, column)
            for k in range(R):
                of_output = left[b, :, k].outer(left[b, :, k])
                dense[b] += inside[b, k, j] * torch.kron(of_output, column)
    return KronEigen((left, right), torch.cat([inside, outside], 1)), dense


@pytest.mark.parametrize("zeros", [0, 1])
def test_a_thin_basis_is_the_dense_matrix(zeros: int) -> None:
    thin, dense = operator(zeros)
    x = torch.randn(B, O, I, dtype=torch.float64)
    wanted = (dense @ x.flatten(1)[..., None]).view_as(x)
    torch.testing.assert_close(thin.apply(x), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(thin.to_dense(), dense, rtol=1e-12, atol=1e-12)
    squares = (thin.eigenvalues * thin.rotate(x).square()).sum((1, 2))
    torch.testing.assert_close(squares, (x * wanted).sum((1, 2)), rtol=1e-12, atol=1e-12)
    trace = (thin.eigenvalues * thin.copies).sum((1, 2))
    torch.testing.assert_close(trace, dense.diagonal(0, 1, 2).sum(1))
    stacked = KronEigen(thin.bases, thin.eigenvalues[:, None]).apply(x[:, None].repeat(1, 5, 1, 1))
    torch.testing.assert_close(stacked[:, 4], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("terms", [3, 6])
def test_the_missing_trace_is_spread_over_the_complement(terms: int) -> None:
    torch.manual_seed(1)
    columns = torch.randn(B, O, terms, dtype=torch.float64)
    columns[:, :, 1] = columns[:, :, 0]  # of rank one less
    squares, basis = LowRank(torch.zeros(B, 1).double(), columns).eigen()
    assert is_thin(basis)
    rebuilt = (basis * squares[:, None]) @ basis.mT
    torch.testing.assert_close(rebuilt, columns @ columns.mT, rtol=1e-12, atol=1e-12)
    grads = torch.randn(B, 9, O, dtype=torch.float64)  # outside of the columns too
    values = (grads @ basis).square().sum(1)[..., None]
    totals = grads.square().sum((1, 2))[:, None, None]
    found = with_outside(values, totals, basis)
    copies = KronEigen((basis, None), found).copies
    torch.testing.assert_close((found * copies).sum((1, 2)), totals[:, 0, 0])
    torch.testing.assert_close(found[:, 0], found[:, -1])  # that of the zero column
