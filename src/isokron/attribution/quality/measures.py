"""How good scores are: against models that were retrained, and against scores without projection.

The linear datamodelling score (Park et al. 2303.14186) of a query is Spearman's ρ, over subsets of
the training examples, of what scores say of a subset and what its model does:

    ρ( Σ_{t in subset} score(q, t),  −loss_q(subset) )
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isokron.attribution.encoding import Encoding, encoding
from isokron.attribution.influence import encoded, gradients, preconditioned
from isokron.attribution.projection import Projection
from isokron.attribution.quality.ranks import spearman
from isokron.attribution.quality.retraining import Retrained
from isokron.attribution.subject import Subject
from isokron.curvature import Curvature
from isokron.curvature.passes import Passes
from isokron.curvature.sites import Site
from isokron.curvature.statistics import Uses

WHITENED, PLAIN = "whitened", "plain"


def lds(scores: Tensor, retrained: Retrained) -> float:
    """The linear datamodelling score of scores [Q, N]: the mean over queries."""
    return float(lds_by_query(scores, retrained).mean())


def lds_by_query(scores: Tensor, retrained: Retrained) -> Tensor:
    """The same of every query: [Q]. 0 where nothing differs between subsets."""
    members, losses = retrained.members, retrained.losses
    if scores.shape != (losses.size(1), members.size(1)):
        raise ValueError(
            f"scores must be [queries, examples] = [{losses.size(1)}, {members.size(1)}], as the "
            f"models were asked for, got {tuple(scores.shape)}"
        )
    return spearman(scores.double() @ members.double().mT, -losses.mT)


def compression(
    subject: Subject,
    curvature: Curvature,
    queries: Iterable[Any],
    dims: Sequence[int],
    *,
    damping: float = 0.1,
    kind: str = "rademacher",
    seed: int = 0,
) -> dict[str, dict[int, float]]:
    """Spearman's ρ of projected scores and those of whole gradients, the mean over queries, by p.

    "whitened": queries and examples alike have curvature folded into their projection; "plain":
    P_l(H⁻¹∇_q)P_rᵀ with P_l∇_tP_rᵀ. Both are compared with ⟨∇_q, H⁻¹∇_t⟩, of the same H, damped by
    sides; but the eigenvalues of EK-FAC have no sides: H is damped as a whole, and nothing can be
    whitened. One pass over the training examples for all of them.
    """
    whole = any(layer.method == "ekfac" for layer in curvature.layers.values())
    inverse = curvature.inverse(damping, relative=True, split="joint" if whole else "sides")
    sites = subject.sites
    own, _ = gradients(subject.model, queries, subject.loss, sites)
    turned = preconditioned(inverse, own)
    exact, *others = [Contestant("exact", 0, encoding(sites), turned)]
    for dim in dims:
        projection = Projection(dim, kind, seed)
        others.append(Contestant(PLAIN, dim, encoding(sites, projection), turned))
        if not whole:
            white = encoding(sites, projection, whiten=curvature, damping=damping)
            others.append(Contestant(WHITENED, dim, white, own))
    scored = _scored(subject, [exact, *others])
    found: dict[str, dict[int, float]] = {}
    for each, scores in zip(others, scored[1:], strict=True):
        found.setdefault(each.name, {})[each.dim] = float(spearman(scores, scored[0]).mean())
    return found


@dataclass(frozen=True, eq=False)
class Contestant:
    """A way to make rows. matrices: of the queries, [Q, B, o, i] by layer."""

    name: str
    dim: int
    encoding: Encoding
    matrices: dict[str, Tensor]

    def queries(self) -> dict[str, Tensor]:
        """Rows by layer: [Q, size]"""
        sizes = [each.size for each in self.encoding.encoders.values()]
        parts = encoded(self.encoding, self.matrices).split(sizes, 1)
        return dict(zip(self.encoding.encoders, parts, strict=True))


def _scored(subject: Subject, contestants: Sequence[Contestant]) -> list[Tensor]:
    """Scores [Q, N] of all contestants, from one pass."""
    queries = [each.queries() for each in contestants]
    batch: list[Tensor | None] = [None] * len(contestants)
    done: list[list[Tensor]] = [[] for _ in contestants]

    def fold(site: Site, uses: Uses) -> None:
        for k, each in enumerate(contestants):
            rows = each.encoding.encoders[site.name].rows(uses)
            own = queries[k][site.name] @ rows.mT
            before = batch[k]
            batch[k] = own if before is None else before + own

    def after() -> None:
        for k, own in enumerate(batch):
            assert own is not None
            done[k].append(own)
            batch[k] = None

    loss, sites = subject.loss, subject.sites
    go = Passes(subject.model, subject.batches(), loss, "empirical", torch.float32, 0, sites, 0)
    go.over(fold, after)
    return [torch.cat(parts, 1) for parts in done]
