"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al., 2409.11321)."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from isokron.linalg import eigenbasis, follow, mirror_, multiply, offdiagonal
from isokron.operators import KronEigen
from isokron.optim.blocks import Batch
from isokron.optim.layout import Traits
from isokron.optim.moments import (
    beta3_ratio,
    blend,
    counted,
    deviation,
    first_moment_,
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
    require,
)

# Of the mean eigenvalue: products of two in E are far above squares of rounding errors in M.
LEAST = 1e-4
GROUP_SETTINGS: dict[str, Any] = {"variances": "rotated", **FACTOR_SETTINGS}


class SOAP(Preconditioned):
    """P = Q[(QᵀM̂) ⊘ (√Ê + ε)], E the second moment of QᵀG, Q the eigenbases of Shampoo's factors.

    The first moment is kept in the basis too: a step rotates the gradient into it and the update
    back. With `graft` it is also kept outside of it, or with moments="8bit" rotated back.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of M and E; β₂ = 1 sums as AdaGrad does. Also those of AdamW.
        eps: ε. Also that of AdamW.
        weight_decay: λ of W ← W − lr·λW.
        factor_beta: Decay rate of the factors; None: betas[1]; 1 sums as AdaGrad does.
        basis: Refresh the basis by one "qr" iteration, or by "eigh". The first is by "eigh".
        tolerance: A basis that diagonalises its factor to this relative error is kept.
        graft: Take the step length of "sgd", "adagrad", "rmsprop" or "adam". None is SOAP as
            published, which makes short steps where gradients have low rank.
        every: Steps between refreshes of the bases.
        start: Step of the first refresh; then at 2·start, 4·start, … up to `every`.
        refresh: "staggered", "together", or a delay in steps; see docs/shampoo.md.
        max_dim: Longer dimensions are cut into blocks.
        average: "schedule_free" or "primal" averages of the iterates; see docs/engine.md.
        nonfinite: On a gradient that is not finite: "raise", "skip" the step or "ignore" it.

    Group settings besides the shared ones of docs/engine.md:
        variances: "rotated" with the basis, or "kept" as they are when it changes, for
            basis="eigh"; eigenvectors are by ascending eigenvalue then.
        factor_dtype: Of the factors; None: that of the state. torch.bfloat16 and "8bit" are for
            the bases too; see docs/memory.md.
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
        factor_beta: float | None = None,
        basis: Literal["qr", "eigh"] = "qr",
        tolerance: float = 0.0,
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
            check=check_soap,
            operator=("basis",),
            moment=first_moment,
            heavy_ball=True,
            squares=True,
        )
        super().__init__(params, lr, traits, **settings, **GROUP_SETTINGS)

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        sides = range(len(batch.shape))
        return {
            "rotated": batch.zeros(),  # the first moment, in the basis
            "variance": batch.zeros(),  # of the gradient in the basis
            **zero_covariances(batch, sides, group["factor_dtype"]),
            **{f"basis.{i}": batch.eyes(batch.shape[i]) for i in sides},
        }

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        for i in sides_of(state):
            observe_side_(state[f"cov.{i}"], grad, i, _factor_beta(group))

    def refresh(
        self, state: dict[str, Tensor], group: Mapping[str, Any], first: bool
    ) -> dict[str, Tensor]:
        if first:  # by eigh: one QR iteration that starts from the identity leads nowhere
            bases = {f"basis.{i}": _basis(state[f"cov.{i}"], group) for i in sides_of(state)}
            return {key: where_observed(basis, key, state) for key, basis in bases.items()}
        return {f"basis.{i}": self._refreshed(state, i, group) for i in sides_of(state)}

    def _refreshed(self, state: dict[str, Tensor], side: int, group: Mapping[str, Any]) -> Tensor:
        old = state[f"basis.{side}"]
        cov = _symmetric(state[f"cov.{side}"], old.dtype)
        old = old.to(cov.dtype)
        basis = _basis(cov, group) if group["basis"] == "eigh" else follow(cov, old)
        if group["tolerance"]:
            fits = offdiagonal(cov, old) <= group["tolerance"]
            basis = torch.where(fits[:, None, None], old, basis)
        return where_observed(basis, f"basis.{side}", state)

    def install(
        self, fresh: dict[str, Tensor], state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        """What lives in the basis turns with it: R = Q_oldᵀQ_new, M ← RᵀM, E ← (R⊙R)ᵀE, mended.

        (R⊙R)ᵀE takes coordinates for uncorrelated, which evens E out: after a large turn steps are
        those of momentum. What it does to d(Q), the diagonal of QᵀFQ, is known: that becomes
        (R⊙R)ᵀd(Q_old) and should be d(Q_new). E is scaled by their ratio.
        """
        rotated, variance = state["rotated"], state["variance"]
        for key, basis in fresh.items():
            dim = int(key[6:]) - (variance.ndim - 1)
            turn = basis.mT @ state[key]
            rotated = multiply(rotated, turn, dim)
            if group["variances"] == "rotated":
                evened = turned_variances(turn, state[f"cov.{key[6:]}"], state[key], basis)
                variance = multiply(variance, evened, dim)
            state[key].copy_(basis)
        beta1, beta2 = group["betas"]
        if group["variances"] == "rotated" and beta1 * beta1 < beta2:  # else there is no bound
            # M² ≤ E Σ v²/w (Cauchy-Schwarz), v and w what M and E weigh gradients with
            weight = (1 - beta1 * beta1 / beta2) * (1 - beta2 if beta2 < 1 else 1.0)
            variance = torch.maximum(variance, rotated.square() * (weight / (1 - beta1) ** 2))
        state["rotated"].copy_(rotated)
        state["variance"].copy_(variance)

    def direction(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        eigen = _eigen(state)
        turned = eigen.rotate(grad)
        second_moment_(state["variance"], turned, beta2)
        spread = deviation(state["variance"], beta2, group["eps"], state, group)
        ratio, count = beta3_ratio(group), counted(state, group)
        moment = first_moment_(state["rotated"], turned, beta1, ratio, count)
        return eigen.unrotate(moment / spread)


def _basis(cov: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Eigenvectors by descending eigenvalue; ascending, as published for variances that stay."""
    return eigenbasis(cov) if group["variances"] == "rotated" else eigenbasis(cov).flip(-1)


def _symmetric(cov: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy with both triangles, at least as precise as `dtype`. [B, d, d]"""
    return mirror_(cov.to(torch.promote_types(cov.dtype, dtype), copy=True))


def turned_variances(turn: Tensor, cov: Tensor, old: Tensor, basis: Tensor) -> Tensor:
    """(R⊙R)ᵀ, its rows scaled so that it turns F's diagonal in the old basis into the new one."""
    squares, cov = turn.square(), _symmetric(cov, basis.dtype)
    sums = squares @ _diagonal(cov, old)
    return squares * torch.where(sums > 0, _diagonal(cov, basis) / sums, 1.0)


def _diagonal(cov: Tensor, basis: Tensor) -> Tensor:
    """Of QᵀFQ, and at least LEAST of its mean. [B, d, 1]"""
    wide = basis.to(cov.dtype)
    values = (wide * (cov @ wide)).sum(-2).unsqueeze(-1)
    return values.maximum(LEAST * values.mean(-2, keepdim=True)).to(basis.dtype)


def _eigen(state: Mapping[str, Tensor]) -> KronEigen:
    bases = [state.get(f"basis.{i}") for i in range(state["variance"].ndim - 1)]
    return KronEigen(tuple(bases), state["variance"])


def first_moment(grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """M̂ = Q(QᵀM̂), out of the basis that it is kept in. [B, ...]"""
    mean = _eigen(state).unrotate(state["rotated"])
    return blend(mean, grad, group["betas"][0], beta3_ratio(group), counted(state, group))


def _factor_beta(group: Mapping[str, Any]) -> float:
    beta = group["factor_beta"]
    return group["betas"][1] if beta is None else beta


def check_soap(group: Mapping[str, Any]) -> None:
    check_choices("SOAP", group, {"basis": ("qr", "eigh"), "variances": ("rotated", "kept")})
    rule = "'rotated' where basis is 'qr', whose columns change places"
    fine = group["variances"] == "rotated" or group["basis"] == "eigh"
    require(fine, "SOAP", group, "variances", rule)
    check_factors("SOAP", group)
    check_number("SOAP", "tolerance", group["tolerance"])
