"""Factors and operators against dense matrices in float64."""

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor

from isokron.linalg import multiply
from isokron.operators import (
    CholeskyInverse,
    Dense,
    Diagonal,
    Factor,
    Identity,
    Kron,
    KronEigen,
    LowRank,
    ScaledKron,
)

Shape = tuple[int, ...]
Operator = Kron | KronEigen | ScaledKron

BATCHES: list[Shape] = [(), (3,), (2, 3)]
BLOCKS: list[Shape] = [(4,), (3, 5), (2, 4, 3), (2, 3, 1, 4)]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.1


def positive(batch: Shape, n: int) -> Tensor:
    root = normal(*batch, n, n)
    return root @ root.mT / n + 0.1 * torch.eye(n, dtype=torch.float64)


def orthogonal(batch: Shape, n: int) -> Tensor:
    return torch.linalg.qr(normal(*batch, n, n)).Q


def identity(batch: Shape, n: int) -> tuple[Factor, Tensor]:
    return Identity(), torch.eye(n, dtype=torch.float64).expand(*batch, n, n)


def diagonal(batch: Shape, n: int) -> tuple[Factor, Tensor]:
    values = uniform(*batch, n)
    return Diagonal(values), torch.diag_embed(values)


def dense(batch: Shape, n: int) -> tuple[Factor, Tensor]:
    matrix = positive(batch, n)
    return Dense(matrix), matrix


def cholesky(batch: Shape, n: int) -> tuple[Factor, Tensor]:
    matrix = positive(batch, n)
    return CholeskyInverse(torch.linalg.cholesky(matrix)), torch.linalg.inv(matrix)


def low_rank(batch: Shape, n: int, width: int = 1, sign: int = 1) -> tuple[Factor, Tensor]:
    base, columns = uniform(*batch, width), normal(*batch, n, 2)
    expected = torch.diag_embed(base.expand(*batch, n)) + sign * columns @ columns.mT
    return LowRank(base, columns, sign), expected


def low_rank_difference(batch: Shape, n: int) -> tuple[Factor, Tensor]:
    return low_rank(batch, n, n, -1)


# every factor: batch, n → a random one and its dense matrix
FACTORS: list[Callable[[Shape, int], tuple[Factor, Tensor]]] = [
    identity,
    diagonal,
    dense,
    cholesky,
    low_rank,
    low_rank_difference,
]


def mixed(batch: Shape, block: Shape) -> Kron:
    """A Kron with a different factor on every dimension."""
    makers = [dense, cholesky, identity, diagonal]
    return Kron(tuple(make(batch, n)[0] for make, n in zip(makers, block, strict=False)))


def eigenbases(batch: Shape, block: Shape) -> tuple[Tensor | None, ...]:
    """Orthogonal bases, and none on the third dimension."""
    return tuple(None if i == 2 else orthogonal(batch, n) for i, n in enumerate(block))


# every operator: batch, block → a random one
OPERATORS: dict[str, Callable[[Shape, Shape], Operator]] = {
    "kron": mixed,
    "kron eigen": lambda batch, block: KronEigen(eigenbases(batch, block), uniform(*batch, *block)),
    "scaled kron": lambda batch, block: ScaledKron(uniform(*batch, *block), mixed(batch, block)),
}


def dense_of(operator: Operator, block: Shape) -> Tensor:
    return operator.to_dense(block) if isinstance(operator, Kron) else operator.to_dense()


def kron_of(sides: list[Tensor]) -> Tensor:
    """A ⊗ B ⊗ …, one batch entry at a time, by torch.kron."""
    batch = torch.broadcast_shapes(*(side.shape[:-2] for side in sides))
    flat = [side.expand(*batch, *side.shape[-2:]).reshape(-1, *side.shape[-2:]) for side in sides]
    products = []
    for entries in zip(*flat, strict=True):
        product = entries[0].contiguous()
        for entry in entries[1:]:
            product = torch.kron(product, entry.contiguous())
        products.append(product)
    return torch.stack(products).reshape(*batch, *products[0].shape)


def close(computed: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-10)


def matvec(matrix: Tensor, x: Tensor, block: Shape) -> Tensor:
    return (matrix @ x.flatten(-len(block)).unsqueeze(-1)).reshape(x.shape)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
def test_multiply_contracts_one_dimension_with_the_columns(batch: Shape, block: Shape) -> None:
    x = normal(*batch, *block)
    for dim in range(-len(block), 0):
        matrix = normal(*batch, 6, block[dim])  # neither symmetric nor square
        spread = matrix.reshape(*batch, *(1,) * (len(block) - 1), 6, block[dim])
        expected = (spread * x.movedim(dim, -1).unsqueeze(-2)).sum(-1).movedim(-1, dim)
        computed = multiply(x, matrix, dim)
        close(computed, expected)
        assert computed.is_contiguous()


def test_multiply_takes_blocks_that_are_not_contiguous_and_empty_ones() -> None:
    x, matrix = normal(3, 5, 4, 2).permute(0, 3, 2, 1), normal(3, 4, 4)
    close(multiply(x, matrix, -2), multiply(x.contiguous(), matrix, -2))
    for shape in [(0, 2, 4, 3), (3, 0, 4, 3), (3, 2, 4, 0)]:
        for dim in (-3, -2, -1):
            empty = torch.zeros(shape)
            computed = multiply(empty, torch.zeros(shape[0], shape[dim], shape[dim]), dim)
            assert computed.shape == shape


@pytest.mark.parametrize(
    ("x", "matrix", "dim"),
    [((2, 3, 4), (2, 4, 4), 2), ((2, 3, 4), (5, 4, 4), -1), ((2, 3, 4), (2, 2, 2), -3)],
)
def test_multiply_names_shapes_that_do_not_fit(x: Shape, matrix: Shape, dim: int) -> None:
    with pytest.raises(ValueError, match=rf"multiply needs .* and dim {dim}"):
        multiply(torch.zeros(x), torch.zeros(matrix), dim)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("make", FACTORS)
def test_a_factor_acts_as_its_dense_matrix(
    make: Callable[[Shape, int], tuple[Factor, Tensor]], batch: Shape, block: Shape
) -> None:
    x = normal(*batch, *block)
    for dim in range(-len(block), 0):
        n = block[dim]
        factor, matrix = make(batch, n)
        close(factor.to_dense(n).expand(*batch, n, n), matrix)
        close(factor.apply(x, dim), multiply(x, matrix, dim))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_acts_as_its_dense_matrix(name: str, batch: Shape, block: Shape) -> None:
    operator, x = OPERATORS[name](batch, block), normal(*batch, *block)
    matrix = dense_of(operator, block)
    assert matrix.shape == (*batch, prod(block), prod(block))
    close(matrix, matrix.mT)
    close(operator.apply(x), matvec(matrix, x, block))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
def test_kron_is_the_kronecker_product_of_its_sides(batch: Shape, block: Shape) -> None:
    kron = mixed(batch, block)
    sides = [factor.to_dense(n) for factor, n in zip(kron.factors, block, strict=True)]
    close(kron.to_dense(block), kron_of(sides))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
def test_kron_eigen_is_the_dense_product_of_bases_and_eigenvalues(
    batch: Shape, block: Shape
) -> None:
    operator = OPERATORS["kron eigen"](batch, block)
    assert isinstance(operator, KronEigen)
    bases = [
        torch.eye(n, dtype=torch.float64).expand(*batch, n, n) if basis is None else basis
        for basis, n in zip(operator.bases, block, strict=True)
    ]
    basis, values = kron_of(bases), torch.diag_embed(operator.eigenvalues.flatten(-len(block)))
    close(operator.to_dense(), basis @ values @ basis.mT)
    x = normal(*batch, *block)
    close(operator.rotate(x), matvec(basis.mT, x, block))
    close(operator.unrotate(operator.rotate(x)), x)


def test_kron_eigen_of_a_product_of_eigenvalues_is_kron() -> None:
    left, right = positive((3,), 4), positive((3,), 5)
    (d_left, q_left), (d_right, q_right) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    operator = KronEigen((q_left, q_right), d_left[:, :, None] * d_right[:, None, :])
    x = normal(3, 4, 5)
    close(operator.apply(x), Kron((Dense(left), Dense(right))).apply(x))
    close(operator.apply(x), left @ x @ right)  # G ⊗ A acts on row-major V as G V A
    close(operator.rotate(x), q_left.mT @ x @ q_right)


@pytest.mark.parametrize("batch", BATCHES)
def test_scaled_kron_is_variances_times_correlations(batch: Shape) -> None:
    block = (2, 4, 3)
    kron, scale = mixed(batch, block), uniform(*batch, *block)
    operator = ScaledKron(scale, kron)
    deviations = torch.diag_embed(scale.flatten(-3))
    close(operator.to_dense(), deviations @ kron.to_dense(block) @ deviations)


def test_identity_alone_needs_a_size_and_keeps_its_block_untouched() -> None:
    x = normal(3, 4)
    assert Identity().apply(x, -1) is x
    with pytest.raises(ValueError, match="give to_dense the size"):
        Identity().to_dense()
    close(Kron((Identity(), Identity())).to_dense((3, 4)), torch.eye(12).double())


def test_dense_matrices_take_the_dtype_of_the_tensors() -> None:
    kron = Kron((Identity(), Dense(torch.eye(3))))
    assert kron.to_dense((2, 3)).dtype is torch.float32
    assert ScaledKron(torch.ones(2, 3), kron).to_dense().dtype is torch.float32
