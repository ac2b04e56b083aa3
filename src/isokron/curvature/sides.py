"""Inverses of both sides by themselves, (G + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹, by Cholesky and Woodbury."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from isokron.curvature.spectra import is_softmax, sides_damping
from isokron.linalg import factorize
from isokron.operators import Dense, Diagonal, Factor, Kron, LowRank


@dataclass(frozen=True)
class Inverted:
    """`before` and `after`: condition numbers, None where eigenvalues are not at hand. `rungs`: how
    far the Cholesky factorisations had to climb, see isokron.linalg.factorize."""

    operator: Kron
    damping: tuple[float, float]
    before: float | None
    after: float | None
    rungs: dict[str, int]


def inverse_by_sides(operator: Kron, damping: float, relative: bool, layer: str) -> Inverted:
    """`relative`: damping is a multiple of the mean eigenvalue of the whole."""
    left, right = operator.factors
    means = mean_eigenvalue(left), mean_eigenvalue(right)
    if relative:
        damping = damping * float((means[0] * means[1]).mean())
    added = sides_damping(*means, damping)
    made: list[Factor] = []
    rungs: Counter[str] = Counter()
    for factor, own, side in zip((left, right), added, ("output", "input"), strict=True):
        inverse, climbed = _inverse(factor, own, f"{side} side of layer {layer!r}")
        made.append(inverse)
        rungs.update(climbed)
    ends = [_ends(factor) for factor in (left, right)]
    before = after = None
    if all(end is not None for end in ends):
        known = [end for end in ends if end is not None]
        before = _condition(known)
        raised = [(low + own, high + own) for (low, high), own in zip(known, added, strict=True)]
        after = _condition(raised)
    numbers = tuple(float(own.mean()) for own in added)
    return Inverted(Kron(tuple(made)), (numbers[0], numbers[1]), before, after, dict(rungs))


def mean_eigenvalue(factor: Factor) -> Tensor:
    """[B]"""
    if isinstance(factor, Diagonal):
        return factor.values.mean(1)
    if isinstance(factor, Dense):
        return factor.matrix.diagonal(dim1=1, dim2=2).mean(1)
    assert isinstance(factor, LowRank)
    outputs = factor.columns.size(-2)
    squares = torch.linalg.vector_norm(factor.columns, dim=(1, 2), dtype=torch.float64).square()
    of_diagonal = factor.diagonal.double().expand(-1, outputs).mean(1)
    return of_diagonal + factor.sign * squares.to(of_diagonal.device) / outputs


def _inverse(factor: Factor, damping: Tensor, what: str) -> tuple[Factor, tuple[str, ...]]:
    """`damping`: [B], one a block."""
    if isinstance(factor, Dense):
        matrix = factor.matrix.clone()
        matrix.diagonal(dim1=1, dim2=2).add_(damping[:, None])
        found = factorize(matrix, name=f"the {what}")
        return Dense(found.inverse().to(matrix.dtype)), found.rungs
    if isinstance(factor, Diagonal):
        values = factor.values + damping[:, None].to(factor.values.dtype)
        if not bool((values > 0).all()):
            raise ValueError(f"the {what} is singular; give a damping above 0 or a max_condition")
        return Diagonal(values.reciprocal()), ()
    assert isinstance(factor, LowRank)
    try:
        if is_softmax(factor):  # of one block, as heads are
            return factor.inverse(float(damping[0])), ()
        lifted = LowRank(factor.diagonal + damping[:, None], factor.columns, factor.sign)
        return lifted.inverse(), ()
    except ValueError as error:
        raise ValueError(f"the {what}: {error}") from None


def _ends(factor: Factor) -> tuple[Tensor, Tensor] | None:
    """Least and largest eigenvalue: [B] each."""
    if isinstance(factor, Diagonal):
        values = factor.values
    elif isinstance(factor, Dense):
        values = torch.linalg.eigvalsh(factor.matrix)
    elif isinstance(factor, LowRank) and not is_softmax(factor):
        found = factor.eigenpairs()[0]
        values = torch.cat([found, torch.zeros_like(factor.diagonal)], 1)
        if found.size(1) >= factor.columns.size(-2):
            values = found
    else:
        return None
    values = values.double().clamp_min(0)
    return values.amin(1), values.amax(1)


def _condition(ends: list[tuple[Tensor, Tensor]]) -> float:
    """Of the product of both sides, over all blocks."""
    (low, high), (lower, higher) = ends
    least, most = float((low * lower).min()), float((high * higher).max())
    return most / least if least > 0 else float("inf")
