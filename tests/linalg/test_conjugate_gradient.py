"""Conjugate gradients against dense solves in float64."""

import torch
from torch import Tensor

from isokron.linalg import conjugate_gradient


def problem(queries: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """A positive definite matrix on two parts of 4 and 6 entries, and right-hand sides."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(10, 10, dtype=torch.float64, generator=generator)
    rhs = torch.randn(queries, 10, dtype=torch.float64, generator=generator)
    matrix = root @ root.mT + 0.1 * torch.eye(10, dtype=torch.float64)
    return matrix, {"a": rhs[None, :, :4], "b": rhs[None, :, 4:]}


def joined(vectors: dict[str, Tensor]) -> Tensor:
    return torch.cat([vectors["a"], vectors["b"]], 2)[0]


def times(matrix: Tensor, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    product = joined(vectors) @ matrix
    return {"a": product[None, :, :4], "b": product[None, :, 4:]}


def solved(steps: int, tolerance: float = 0.0, precondition: Tensor | None = None) -> Tensor:
    matrix, rhs = problem()
    inverse = torch.eye(10, dtype=torch.float64) if precondition is None else precondition
    return conjugate_gradient(
        lambda v: times(matrix, v), lambda v: times(inverse, v), rhs, steps, tolerance=tolerance
    )


def test_as_many_steps_as_dimensions_solve_exactly() -> None:
    matrix, rhs = problem()
    right = torch.linalg.solve(matrix, joined(rhs).mT).mT
    result = solved(12)
    assert torch.allclose(joined(result.vectors), right, rtol=1e-8, atol=1e-8)
    assert float(result.after.max()) < 1e-8


def test_an_exact_preconditioner_needs_one_step() -> None:
    matrix, rhs = problem()
    result = solved(5, 1e-9, precondition=matrix.inverse())
    assert result.products == 1
    assert float(result.before.max()) < 1e-9
    assert torch.allclose(joined(result.vectors) @ matrix, joined(rhs))


def test_residuals_are_those_of_their_definition() -> None:
    matrix, rhs = problem()
    result, b = solved(3), joined(rhs)
    before, after = (
        (b - x @ matrix).norm(dim=1) / b.norm(dim=1) for x in (b, joined(result.vectors))
    )
    assert torch.allclose(result.before, before)
    assert torch.allclose(result.after, after)


def test_a_converged_query_is_left_alone_and_zeros_stay_zeros() -> None:
    matrix, rhs = problem()
    rhs = {name: value.index_fill(1, torch.tensor([1]), 0.0) for name, value in rhs.items()}
    result = conjugate_gradient(lambda v: times(matrix, v), dict, rhs, 12, tolerance=1e-6)
    assert not joined(result.vectors)[1].any()
    assert float(result.after.max()) <= 1e-6
    alone = conjugate_gradient(
        lambda v: times(matrix, v),
        dict,
        {name: value[:, :1] for name, value in rhs.items()},
        12,
        tolerance=1e-6,
    )
    assert torch.allclose(joined(result.vectors)[0], joined(alone.vectors)[0])
