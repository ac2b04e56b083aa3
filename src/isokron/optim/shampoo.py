"""Shampoo: one inverse root per dimension of a block (Gupta et al., 1802.09568)."""

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from isokron.exponents import Exponent, check_root, exponents
from isokron.linalg import eigh, inverse_power, inverse_root
from isokron.operators import Dense, Factor, Identity, Kron
from isokron.optim.blocks import Batch
from isokron.optim.layout import Traits
from isokron.optim.moments import (
    debiased,
    observe_side_,
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
    checked_keywords,
    keywords_of,
    require,
)

CHOICES = {"statistic": ("gradient", "kl", "kl_sum"), "form": ("root", "eigen")}
GROUP_SETTINGS: dict[str, Any] = {
    **{"deficient": "relative", "solver": "eigh", "form": "root"},
    **FACTOR_SETTINGS,
}


class Shampoo(Preconditioned):
    """P = M̂ ×_1 A_1 … ×_k A_k, A_i = (F̂_i + εI)^(−1/p), F_i the second moment along dimension i.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate.
        betas: β₁ of the first moment; β₂ of grafting. Both are those of AdamW too.
        eps: Added to the root of second moments in grafting and AdamW.
        weight_decay: λ of W ← W − lr·λW.
        factor_beta: Decay rate of F; 1 sums as AdaGrad does.
        damping: ε, relative to the mean eigenvalue of F̂.
        exponent: p: a number, or {order: number or one per dimension}; 0 leaves a dimension alone,
            None is twice the order of a block, as first published.
        statistic: "gradient", or "kl": F_i of gradients that the other factors have
            preconditioned (KL-Shampoo, 2509.03378), the mean over columns; "kl_sum" is the sum.
        graft: Take the step length of "sgd", "adagrad", "rmsprop" or "adam"; None: Shampoo's own.
        every: Steps between refreshes of the roots.
        start: Step of the first refresh; then at 2·start, 4·start, … up to `every`.
        refresh: "staggered", "together", or a delay in steps; see docs/shampoo.md.
        max_dim: Longer dimensions are cut into blocks.
        average: "schedule_free" or "primal" averages of the iterates; see docs/engine.md.
        nonfinite: On a gradient that is not finite: "raise", "skip" the step or "ignore" it.

    Group settings besides the shared ones of docs/engine.md:
        deficient: ε is "relative", or absolute by "lift"; "pseudo", with ε = 0, is the
            pseudo-inverse.
        form: "root" keeps A, "eigen" eigenvalues and eigenvectors of F̂, of which a changed damping
            or exponent makes another A at once.
        solver: Of roots: "eigh", or "newton" or "higher", which use matrix products only.
        factor_dtype: Of F; None: that of the state. torch.bfloat16 and "8bit" are for its roots
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
        damping: float = 1e-4,
        exponent: Exponent = 2,
        statistic: Literal["gradient", "kl", "kl_sum"] = "gradient",
        graft: Graft = "adam",
        every: int = 10,
        start: int | None = 2,
        refresh: Refresh = "staggered",
        max_dim: int | None = 256,
        average: Average = None,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        settings = keywords_of(locals())
        traits = Traits(
            check=check_shampoo,
            operator=("root", "values", "basis"),
            heavy_ball=True,
            squares=True,
        )
        super().__init__(params, lr, traits, **settings, **GROUP_SETTINGS)

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        roots = exponents(group, len(batch.shape))
        sides = [i for i in range(len(batch.shape)) if roots[i]]
        state = zero_covariances(batch, sides, group["factor_dtype"])
        eyes = {i: batch.eyes(batch.shape[i]) for i in sides}
        if group["form"] == "root":
            return state | {f"root.{i}": eye for i, eye in eyes.items()}
        # eigenvalues of which A is the identity
        one = {"lift": 1 - group["damping"], "relative": 1 / (1 + group["damping"])}
        for i, eye in eyes.items():
            values = torch.full_like(eye[..., 0], one.get(group["deficient"], 1.0))
            state |= {f"values.{i}": values, f"basis.{i}": eye}
        return state

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        if group["statistic"] == "gradient":
            for i in sides_of(state):
                observe_side_(state[f"cov.{i}"], grad, i, group["factor_beta"])
            return
        # KL-Shampoo: F_i sees gradients that the other dimensions' roots have whitened
        factors = _factors(state, grad.ndim - 1, group)
        for i in sides_of(state):
            sides = [Identity() if j == i else factor for j, factor in enumerate(factors)]
            white = Kron(tuple(sides)).apply(grad)
            columns = prod(grad.shape[1:]) / grad.size(i + 1)
            scale = 1 / columns if group["statistic"] == "kl" else 1.0
            observe_side_(state[f"cov.{i}"], white, i, group["factor_beta"], scale)

    def refresh(
        self, state: dict[str, Tensor], group: Mapping[str, Any], first: bool
    ) -> dict[str, Tensor]:
        fresh, roots = {}, exponents(group, state["step"].ndim - 1)
        for i in sides_of(state):
            # F̂ corrects for the start at zero: roots have their scale from the first refresh on
            cov = debiased(state, i, group["factor_beta"], group)
            if group["form"] == "eigen":
                fresh[f"values.{i}"], fresh[f"basis.{i}"] = eigh(cov)
                continue
            root, settings = roots[i], (group["damping"], group["deficient"], group["solver"])
            fresh[f"root.{i}"] = inverse_root(cov, root, *settings)
        return {key: where_observed(value, key, state) for key, value in fresh.items()}

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        return Kron(_factors(state, moment.ndim - 1, group)).apply(moment)


def _factors(
    state: Mapping[str, Tensor], order: int, group: Mapping[str, Any]
) -> tuple[Factor, ...]:
    """A_i of every dimension; a dimension of exponent 0 has none."""
    factors: list[Factor] = [Identity()] * order
    for i in sides_of(state):
        if group["form"] == "root":
            factors[i] = Dense(state[f"root.{i}"])
        else:
            values, basis = state[f"values.{i}"], state[f"basis.{i}"]
            root = exponents(group, order)[i]
            powers = inverse_power(values, root, group["damping"], group["deficient"])
            factors[i] = Dense((basis * powers.unsqueeze(-2)) @ basis.mT)
    return tuple(factors)


def check_shampoo(group: Mapping[str, Any]) -> None:
    check_choices("Shampoo", group, CHOICES)
    check_factors("Shampoo", group)
    rule = "'eigh' where form is 'eigen'"
    fine = group["form"] == "root" or group["solver"] == "eigh"
    require(fine, "Shampoo", group, "solver", rule)
    # the exponent may depend on the order of a block, which is not known yet
    for order in range(1, 5):
        for root in exponents(group, order):
            if root:
                settings = {key: group[key] for key in ("deficient", "solver")}
                check_root(root, group["damping"], **settings)
