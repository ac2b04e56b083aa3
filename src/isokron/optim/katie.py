"""Katie: diagonal variances times Kronecker correlations (docs/katie.md)."""

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from isokron.exponents import Exponent, exponents
from isokron.linalg import inverse_root
from isokron.operators import Dense, Identity, Kron, ScaledKron
from isokron.optim.blocks import Batch
from isokron.optim.layout import Traits
from isokron.optim.moments import (
    debiased,
    deviation,
    graft,
    observe_side_,
    second_moment_,
    sides_of,
    where_observed,
    zero_covariances,
)
from isokron.optim.preconditioned import Params, Preconditioned
from isokron.optim.settings import (
    FACTOR_SETTINGS,
    Average,
    Graft,
    Nonfinite,
    Refresh,
    check_choices,
    check_factors,
    check_number,
    checked_keywords,
    keywords_of,
)

CHOICES = {"form": ("sequential", "symmetric"), "statistic": ("correlation", "raw")}
GROUP_SETTINGS: dict[str, Any] = {"statistic": "correlation", **FACTOR_SETTINGS}


class Katie(Preconditioned):
    """Δ = (M̂ ⊘ S) ×_i (K̂_i + λI)^(−1/p), scaled to the norm of M̂ ⊘ S; S = √V̂ + ε.

    The gradient's covariance is modelled as D^½ K D^½: V estimates its variances D, and K_i the
    correlations of Z = G ⊘ S along dimension i, whose mean eigenvalue is about one.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of M and V; β₂ = 1 sums V as AdaGrad does, and Z then divides by the
            root of the mean of squares. Also those of AdamW.
        eps: ε. Also that of AdamW.
        weight_decay: λ of W ← W − lr·λW.
        factor_beta: Decay rate of K; 1 sums.
        damping: λ of K̂ + λI, without unit.
        exponent: p, as of Shampoo.
        form: "sequential", or "symmetric": divide by √S before and after, which makes the
            operator positive definite.
        graft: Take the step length of "sgd", "adagrad", "rmsprop" or "adam"; None: that of M̂ ⊘ S.
        every: Steps between refreshes of the roots.
        start: Step of the first refresh; then at 2·start, 4·start, … up to `every`.
        refresh: "staggered", "together", or a delay in steps; see docs/shampoo.md.
        max_dim: Longer dimensions are cut into blocks.
        average: "schedule_free" or "primal" averages of the iterates; see docs/engine.md.
        nonfinite: On a gradient that is not finite: "raise", "skip" the step or "ignore" it.

    Group settings besides the shared ones of docs/engine.md:
        statistic: "raw" takes the factors from G, which counts its scale twice; for comparison.
        factor_dtype: Of K; None: that of the state. torch.bfloat16 and "8bit" are for its roots
            too; see docs/memory.md.
        beta3: β₃ of the moment β₃M + (1−β₃)G that is stepped along, M the mean before G; None: β₁.
        dampening: δ of the momentum on the update, B ← μB + (1−δ)P.
    """

    @checked_keywords(GROUP_SETTINGS)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        factor_beta: float = 0.95,
        damping: float = 1e-2,
        exponent: Exponent = 2,
        form: Literal["sequential", "symmetric"] = "sequential",
        graft: Graft = None,
        every: int = 10,
        start: int | None = 2,
        refresh: Refresh = "staggered",
        max_dim: int | None = 256,
        average: Average = None,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        settings = keywords_of(locals())
        traits = Traits(
            check=check_katie,
            operator=("root",),
            heavy_ball=True,
            squares=True,
        )
        super().__init__(params, lr, traits, **settings, **GROUP_SETTINGS)

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        powers = exponents(group, len(batch.shape))
        sides = [i for i in range(len(batch.shape)) if powers[i]]
        return {
            "variance": batch.zeros(),
            **zero_covariances(batch, sides, group["factor_dtype"]),
            **{f"root.{i}": batch.eyes(batch.shape[i]) for i in sides},
        }

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        """Update V and K; state["deviation"] is S during this step."""
        beta = group["betas"][1]
        second_moment_(state["variance"], grad, beta)
        # without ε, an entry that has never had a gradient would be 0/0
        eps = group["eps"] or torch.finfo(grad.dtype).tiny
        spread = state["deviation"] = deviation(state["variance"], beta, eps, state, group)
        if beta == 1:  # S of a sum grows, and Z, and with it K, would fade
            spread = (state["variance"] / state["step"]).sqrt_().add_(eps)
        observed = grad if group["statistic"] == "raw" else grad / spread
        for i in sides_of(state):
            scale = grad.size(i + 1) / prod(grad.shape[1:])
            observe_side_(state[f"cov.{i}"], observed, i, group["factor_beta"], scale)

    def refresh(
        self, state: dict[str, Tensor], group: Mapping[str, Any], first: bool
    ) -> dict[str, Tensor]:
        powers, fresh = exponents(group, state["step"].ndim - 1), {}
        for i in sides_of(state):
            cov = debiased(state, i, group["factor_beta"], group)
            fresh[f"root.{i}"] = inverse_root(cov, powers[i], group["damping"])
        return {key: where_observed(root, key, state) for key, root in fresh.items()}

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        spread, sides = state["deviation"], sides_of(state)
        kron = Kron(
            tuple(
                Dense(state[f"root.{i}"]) if i in sides else Identity()
                for i in range(moment.ndim - 1)
            )
        )
        adam = moment / spread
        if group["form"] == "symmetric":
            white = ScaledKron(spread.rsqrt(), kron).apply(moment)
        else:
            white = kron.apply(adam)
        return graft(white, adam)


def check_katie(group: Mapping[str, Any]) -> None:
    check_choices("Katie", group, CHOICES)
    check_factors("Katie", group)
    check_number("Katie", "damping", group["damping"], "above 0")
    for order in range(1, 5):
        exponents(group, order)
