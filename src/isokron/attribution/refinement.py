"""Refined scores: ⟨(G + D)⁻¹∇_q, ∇_t⟩ with the exact Gauss–Newton matrix G of the training data.

A fitted curvature H leaves out what does not fit its form, such as blocks between layers. A few
steps of conjugate gradients with H⁻¹ as preconditioner solve for G instead. D = λ_l I in layer l,
with the λ_l of the fitted curvature, so that refinement changes the matrix and not its damping.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from isokron.attribution.data import Subject
from isokron.attribution.queries import Query
from isokron.attribution.score import LayerQueries, QueryGradients, query_gradients
from isokron.attribution.scorers import ExactScorer
from isokron.curvature import Curvature
from isokron.curvature.curvature import mean_eigenvalue
from isokron.curvature.gauss_newton import GaussNewton, Vectors
from isokron.curvature.losses import Likelihood
from isokron.linalg import conjugate_gradient
from isokron.operators import KronEigen

TOLERANCE = 1e-3  # relative residual at which a solve ends
OTHER_SCALE = 20.0  # relative residual of H⁻¹∇ from which on H is too small


@dataclass(frozen=True)
class Solved:
    """(G + D)⁻¹∇ of one query by layer, [B, o, i], and what else is known of the query."""

    vectors: Vectors
    square: float
    loss: float
    token_losses: list[float]
    residual: tuple[float, float]  # relative, before refinement and after it


@dataclass(frozen=True, eq=False)
class RefinedScorer(ExactScorer):
    """Scores by (G + D)⁻¹ in place of H⁻¹; queries are solved for once, and stay in memory.

    steps: most products with G, one pass over the data each. of_optimizer: whether the curvature is
    that of an optimizer. solved: by the queries whose gradients were summed, a single one unless
    `mean` was asked for.
    """

    # of G, without what damping on both sides of K-FAC adds; docs/refinement.md
    default_damping: ClassVar[float] = 10.0
    curvature: Curvature | None
    steps: int
    of_optimizer: bool = False
    solved: dict[tuple[Query, ...], Solved] = field(default_factory=dict)

    def settled(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        check_refinable(self.subject, settings, self.of_optimizer)
        if self.curvature is None:
            raise ValueError(
                f"refine={self.steps} needs a fitted curvature as preconditioner; call fit() first"
            )
        return super().settled(settings)

    def gradients(
        self, queries: Sequence[Query], damping: float, mean: bool = False
    ) -> QueryGradients:
        """(G + D)⁻¹∇ of every query; with `mean`, of their sum."""
        keys = [tuple(queries)] if mean else [(query,) for query in queries]
        if any(key not in self.solved for key in keys):
            self._solve(queries, damping, mean, keys)
        solved, inverse = [self.solved[key] for key in keys], self.inverse(damping)
        assert inverse is not None
        result = QueryGradients(len(keys))
        for layer in self.subject.layers:
            part = LayerQueries(layer, inverse[layer.name], self.subject.device)
            part.count = len(keys)
            part.matrix_owner = torch.arange(len(keys), device=self.subject.device)
            part.matrices = torch.stack([query.vectors[layer.name] for query in solved])
            result.layers[layer.name] = part
        result.squares = [query.square for query in solved]
        result.losses = [query.loss for query in solved]
        result.token_losses = [query.token_losses for query in solved]
        return result

    def _solve(
        self,
        queries: Sequence[Query],
        damping: float,
        mean: bool,
        keys: Sequence[tuple[Query, ...]],
    ) -> None:
        subject, inverse, fitted = self.subject, self.inverse(damping), self.curvature
        assert inverse is not None
        assert fitted is not None
        assert isinstance(subject.loss, Likelihood)
        groups = [0] * len(queries) if mean else None
        names = [query.name for query in queries]
        plain = query_gradients(subject, self._batches_of(queries), None, groups, names)
        rhs = {name: matrices(part).movedim(0, 1) for name, part in plain.layers.items()}
        plain.layers.clear()
        batches = self._share(subject.data.plan(), "refine")
        exact = GaussNewton(subject.model, subject.layers, subject.loss, batches, subject.ranks)
        levels = {name: damping * float(mean_eigenvalue(fitted[name]).mean()) for name in rhs}

        def product(vectors: Vectors) -> Vectors:
            images = exact.product(vectors)
            return {name: images[name].add_(v, alpha=levels[name]) for name, v in vectors.items()}

        def precondition(vectors: Vectors) -> Vectors:
            return {name: applied(inverse[name], value) for name, value in vectors.items()}

        def agreed(finished: bool) -> bool:
            if subject.ranks is not None:
                subject.ranks.agree("whether refinement has converged", finished)
            return finished

        solution = conjugate_gradient(
            product, precondition, rhs, self.steps, tolerance=TOLERANCE, agreed=agreed
        )
        before = float(solution.before.mean())
        if before > OTHER_SCALE:
            warnings.warn(
                f"the fitted curvature, and damping relative to it, are far smaller than the "
                f"Gauss-Newton matrix (residual {before:.0f} before refinement): scores may not "
                "have converged. The empirical Fisher is, where a model fits its data; fit with "
                "fisher='exact' or 'sampled'. If that is done, raise damping or refine",
                stacklevel=2,
            )
        products = [rhs[n] * solution.vectors[n] for n in rhs]
        squares = torch.stack([value.sum((0, 2, 3)) for value in products]).sum(0)
        for i, key in enumerate(keys):
            self.solved[key] = Solved(
                {name: value[:, i] for name, value in solution.vectors.items()},
                float(squares[i]),
                sum(plain.losses) if mean else plain.losses[i],
                [] if mean else plain.token_losses[i],
                (float(solution.before[i]), float(solution.after[i])),
            )

    def record(self) -> dict[str, Any]:
        """Settings and relative residuals of what was solved, the means over queries."""
        residuals = [query.residual for query in self.solved.values()]
        before, after = (sum(values) / len(values) for values in zip(*residuals, strict=True))
        return {"steps": self.steps, "residual_before": before, "residual_after": after}


def matrices(queries: LayerQueries) -> Tensor:
    """Gradients of queries at one layer as matrices: [Q, B, o, i]"""
    total = queries.matrices.new_zeros(queries.count, *queries.layer.shape)
    total.index_add_(0, queries.matrix_owner, queries.matrices)
    for query in queries.owner.unique().tolist():
        terms = queries.owner == query
        total[query] += queries.left[:, terms].mT @ queries.right[:, terms]
    return total


def applied(operator: Any, vectors: Tensor) -> Tensor:
    """The operator of a layer on Q vectors: [B, Q, o, i]"""
    if isinstance(operator, KronEigen):
        operator = replace(operator, eigenvalues=operator.eigenvalues[:, None])
    result: Tensor = operator.apply(vectors)
    return result


def check_refinable(subject: Subject, settings: Mapping[str, Any], optimizer: bool) -> None:
    """Refuse what cannot be refined, before any pass.

    settings: of `Attributor.score`. optimizer: whether the curvature is that of an optimizer.
    """
    what = f"refine={settings['refine']}"
    if settings["store"]:
        raise ValueError(
            f"{what} needs exact scores, and a store holds gradients whitened by the fitted "
            "curvature; score exactly (store=False)"
        )
    if settings["unit"]:
        raise ValueError(
            f"{what} does not go with unit=True, which needs the norm of every example by a solve "
            "of its own; leave one of them out"
        )
    if not isinstance(subject.loss, Likelihood):
        raise ValueError(
            f"{what} needs the distribution that the model predicts, which a loss function does "
            "not tell; give loss=isokron.losses.CrossEntropy() or another of isokron.losses, or a "
            "task with logits"
        )
    if optimizer:
        raise ValueError(
            f"{what} needs damping in the scale of single loss terms, which the gradients of an "
            "optimizer do not have; fit the curvature to the data"
        )
    for layer in subject.layers:
        if layer.kind == "index":
            raise ValueError(
                f"{what} needs whole gradients, and that of the embedding {layer.name!r} is too "
                f"large for it; leave it out: layers='!{layer.name}'"
            )
