from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor

from isokron.operators import (
    CholeskyInverse,
    Dense,
    Diagonal,
    Eigen,
    Factor,
    Identity,
    Kron,
    KronEigen,
    LowRank,
    ScaledKron,
    multiply,
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


# every factor: batch, n → a random one
FACTORS: dict[str, Callable[[Shape, int], Factor]] = {
    "identity": lambda batch, n: Identity(),
    "diagonal": lambda batch, n: Diagonal(uniform(*batch, n)),
    "dense": lambda batch, n: Dense(positive(batch, n)),
    "cholesky": lambda batch, n: CholeskyInverse(torch.linalg.cholesky(positive(batch, n))),
    "eigen": lambda batch, n: Eigen(uniform(*batch, n), orthogonal(batch, n)),
    "low rank": lambda batch, n: LowRank(uniform(*batch, 1), normal(*batch, n, 2)),
}


def mixed(batch: Shape, block: Shape) -> Kron:
    """A Kron with a different kind of factor on every side."""
    kinds = ["dense", "eigen", "identity", "diagonal"]
    return Kron(tuple(FACTORS[kind](batch, n) for kind, n in zip(kinds, block, strict=False)))


def eigenbases(batch: Shape, block: Shape) -> tuple[Tensor | None, ...]:
    """Orthogonal bases, and none on the third side."""
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


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def matvec(matrix: Tensor, x: Tensor, block: Shape) -> Tensor:
    return (matrix @ x.flatten(-len(block)).unsqueeze(-1)).reshape(x.shape)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
def test_multiply_contracts_one_dimension_with_the_columns(batch: Shape, block: Shape) -> None:
    x = normal(*batch, *block)
    for dim in range(-len(block), 0):
        matrix = normal(*batch, 6, block[dim])  # neither symmetric nor square
        spread = matrix.reshape(*batch, *(1,) * (len(block) - 1), 6, block[dim])
        wanted = (spread * x.movedim(dim, -1).unsqueeze(-2)).sum(-1).movedim(-1, dim)
        found = multiply(x, matrix, dim)
        close(found, wanted)
        assert found.is_contiguous()


@pytest.mark.parametrize("batch", BATCHES)
def test_multiply_by_the_transpose_is_the_adjoint(batch: Shape) -> None:
    x, y, matrix = normal(*batch, 2, 4, 3), normal(*batch, 2, 4, 3), normal(*batch, 4, 4)
    close((multiply(x, matrix, -2) * y).sum(), (x * multiply(y, matrix.mT, -2)).sum())


def test_multiply_takes_blocks_that_are_not_contiguous_and_empty_ones() -> None:
    x, matrix = normal(3, 5, 4, 2).permute(0, 3, 2, 1), normal(3, 4, 4)
    close(multiply(x, matrix, -2), multiply(x.contiguous(), matrix, -2))
    for shape in [(0, 2, 4, 3), (3, 0, 4, 3), (3, 2, 4, 0)]:
        for dim in (-3, -2, -1):
            empty = torch.zeros(shape)
            found = multiply(empty, torch.zeros(shape[0], shape[dim], shape[dim]), dim)
            assert found.shape == shape


@pytest.mark.parametrize(
    ("x", "matrix", "dim"),
    [((2, 3, 4), (2, 4, 4), 2), ((2, 3, 4), (5, 4, 4), -1), ((2, 3, 4), (2, 2, 2), -3)],
)
def test_multiply_names_shapes_that_do_not_fit(x: Shape, matrix: Shape, dim: int) -> None:
    with pytest.raises(ValueError, match=rf"multiply needs .* and dim {dim}"):
        multiply(torch.zeros(x), torch.zeros(matrix), dim)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", FACTORS)
def test_a_factor_acts_as_its_dense_matrix(kind: str, batch: Shape, block: Shape) -> None:
    x = normal(*batch, *block)
    for dim in range(-len(block), 0):
        n = block[dim]
        factor = FACTORS[kind](batch, n)
        dense = factor.to_dense(n).expand(*batch, n, n)
        close(factor.apply(x, dim), multiply(x, dense, dim))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_acts_as_its_dense_matrix(name: str, batch: Shape, block: Shape) -> None:
    operator, x = OPERATORS[name](batch, block), normal(*batch, *block)
    dense = dense_of(operator, block)
    assert dense.shape == (*batch, prod(block), prod(block))
    close(dense, dense.mT)
    close(operator.apply(x), matvec(dense, x, block))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
def test_kron_is_the_kronecker_product_of_its_sides(batch: Shape, block: Shape) -> None:
    kron = mixed(batch, block)
    sides = [factor.to_dense(n) for factor, n in zip(kron.factors, block, strict=True)]
    close(kron.to_dense(block), kron_of(sides))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", BLOCKS)
def test_kron_eigen_has_its_eigenvalues_in_its_bases(batch: Shape, block: Shape) -> None:
    operator = OPERATORS["kron eigen"](batch, block)
    assert isinstance(operator, KronEigen)
    dense = operator.to_dense()
    x = normal(*batch, *block)
    close(operator.unrotate(operator.rotate(x)), x)
    spectrum = operator.eigenvalues.flatten(-len(block)).sort(-1).values
    close(torch.linalg.eigvalsh(dense), spectrum)


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
