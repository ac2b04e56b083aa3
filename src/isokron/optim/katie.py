"""Katie: diagonal variances times Kronecker correlations."""

from collections.abc import Mapping
from math import prod
from typing import Any, Unpack

import torch
from torch import Tensor

from isokron.exponents import Exponent, exponents
from isokron.linalg import inverse_root
from isokron.operators import Dense, Identity, Kron, ScaledKron
from isokron.optim.blocks import Batch
from isokron.optim.covariances import (
    debiased,
    known_only,
    observe_side_,
    sides_of,
    zero_covariances,
)
from isokron.optim.engine import Params, Preconditioned
from isokron.optim.grafting import graft
from isokron.optim.groups import check_factors, check_number
from isokron.optim.moments import corrected, second_moment_
from isokron.optim.settings import HeavyBall

FORMS = ("sequential", "symmetric")
STATISTICS = ("correlation", "raw")


class Katie(Preconditioned):
    """Δ = (M̂ ⊘ S) ×_i (K̂_i + λI)^(−1/p), scaled to the norm of M̂ ⊘ S; S = √V̂ + ε.

    The gradient's covariance is taken for D^½ K D^½: V, at rate betas[1], estimates its variances
    D, and K_i, at rate `factor_beta`, the correlations of Z = G ⊘ S along dimension i. Their mean
    eigenvalue is about one, so `damping` λ has no unit. A rate of 1 sums as AdaGrad does; Z then
    divides by the root of the mean of squares. `exponent`: p, as of Shampoo. `form`: "symmetric"
    divides by √S before and after, which makes the operator positive definite. `statistic`: "raw"
    takes the factors from G itself and so counts its scale twice; it is there to compare with.
    `shared`: docs/engine.md.
    """

    heavy_ball = True
    squares = True
    operator = ("root",)
    shaping = ("exponent", "factor_dtype")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        factor_beta: float = 0.95,
        damping: float = 1e-2,
        exponent: Exponent = 2,
        form: str = "sequential",
        statistic: str = "correlation",
        factor_dtype: torch.dtype | None = None,
        graft: str | None = None,
        weight_decay: float = 0.1,
        every: int = 10,
        start: int | None = 2,
        max_dim: int | None = 256,
        **shared: Unpack[HeavyBall],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas=betas,
            factor_beta=factor_beta,
            damping=damping,
            exponent=exponent,
            form=form,
            statistic=statistic,
            factor_dtype=factor_dtype,
            graft=graft,
            weight_decay=weight_decay,
            every=every,
            start=start,
            max_dim=max_dim,
            **shared,
        )

    def check(self, group: Mapping[str, Any]) -> None:
        for name, choices in (("form", FORMS), ("statistic", STATISTICS)):
            if group[name] not in choices:
                raise ValueError(f"Katie: {name} must be one of {choices}, got {group[name]!r}")
        check_factors("Katie", group)
        check_number("Katie", "damping", group["damping"], "above 0")
        for order in range(1, 5):
            exponents(group, order)

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        powers = exponents(group, len(batch.shape))
        sides = [i for i in range(len(batch.shape)) if powers[i]]
        return {
            "variance": batch.zeros(),
            **zero_covariances(batch, sides, group["factor_dtype"]),
            **{f"root.{i}": batch.eyes(batch.shape[i]) for i in sides},
        }

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        beta = group["betas"][1]
        second_moment_(state["variance"], grad, beta)
        raw = group["statistic"] == "raw"
        seen = grad if raw else grad / _deviation(state, group, mean=True)
        for i in sides_of(state):
            scale = grad.size(i + 1) / prod(grad.shape[1:])
            observe_side_(state[f"cov.{i}"], seen, i, group["factor_beta"], scale)

    def refresh(self, state: dict[str, Tensor], group: Mapping[str, Any]) -> dict[str, Tensor]:
        powers, fresh = exponents(group, state["step"].ndim - 1), {}
        for i in sides_of(state):
            cov = debiased(state, i, group["factor_beta"], group)
            fresh[f"root.{i}"] = inverse_root(cov, powers[i], group["damping"])
        return {key: known_only(root, key, state) for key, root in fresh.items()}

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        deviation = _deviation(state, group)
        sides = sides_of(state)
        kron = Kron(
            tuple(
                Dense(state[f"root.{i}"]) if i in sides else Identity()
                for i in range(moment.ndim - 1)
            )
        )
        adam = moment / deviation
        if group["form"] == "symmetric":
            white = ScaledKron(deviation.rsqrt(), kron).apply(moment)
        else:
            white = kron.apply(adam)
        return graft(white, adam)


def _deviation(state: Mapping[str, Tensor], group: Mapping[str, Any], mean: bool = False) -> Tensor:
    """S = √V̂ + ε; `mean`: of a sum, that of V/t. [B, ...]"""
    beta = group["betas"][1]
    variance = corrected(state["variance"], beta, state, group)
    if mean and beta == 1:  # else Z, and with it K, would fade
        variance = variance / state["step"]
    # without ε, an entry that has never had a gradient would be 0/0
    return variance.sqrt().add_(group["eps"] or torch.finfo(variance.dtype).tiny)
