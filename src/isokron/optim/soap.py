"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al., 2409.11321)."""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from isokron.linalg import eigenbasis, follow, mirror_, offdiagonal
from isokron.operators import KronEigen
from isokron.operators.factors import multiply
from isokron.optim.blocks import Batch
from isokron.optim.covariances import (
    known_only,
    observe_side_,
    sides_of,
    zero_covariances,
)
from isokron.optim.engine import Params, Preconditioned
from isokron.optim.groups import check_factors, check_number
from isokron.optim.moments import (
    corrected,
    counted,
    first_moment_,
    second_moment_,
)
from isokron.optim.settings import HeavyBall

BASES = ("qr", "eigh")


class SOAP(Preconditioned):
    """P = Q[(QᵀM̂) ⊘ (√Ê + ε)], E the second moment of QᵀG, Q the eigenbases of Shampoo's factors.

    The first moment is kept in the basis too: a step rotates the gradient there and the update
    back, and nothing else. `factor_beta`: of the factors, betas[1] by default; 1, of either, sums
    as AdaGrad does. `basis`: how it is
    refreshed after its first time, by one "qr" iteration or by "eigh". `tolerance`: a basis that
    diagonalises its factor to this relative error is left as it is. `graft`: with None, as SOAP was
    published, a gradient of low rank makes a short step. `shared`: see docs/engine.md.
    """

    heavy_ball = True
    keeps_moment = True
    squares = True
    operator = ("basis",)
    shaping = ("factor_dtype",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        factor_beta: float | None = None,
        basis: str = "qr",
        tolerance: float = 0.0,
        factor_dtype: torch.dtype | None = None,
        graft: str | None = "adam",
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
            basis=basis,
            tolerance=tolerance,
            factor_dtype=factor_dtype,
            graft=graft,
            weight_decay=weight_decay,
            every=every,
            start=start,
            max_dim=max_dim,
            **shared,
        )

    def check(self, group: Mapping[str, Any]) -> None:
        if group["basis"] not in BASES:
            raise ValueError(f"SOAP: basis must be one of {BASES}, got {group['basis']!r}")
        check_factors("SOAP", group)
        check_number("SOAP", "tolerance", group["tolerance"])

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

    def first_refresh(
        self, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """By eigh: one iteration that starts from the identity leads nowhere."""
        bases = {f"basis.{i}": eigenbasis(state[f"cov.{i}"]) for i in sides_of(state)}
        return {key: known_only(basis, key, state) for key, basis in bases.items()}

    def refresh(self, state: dict[str, Tensor], group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {f"basis.{i}": self._refreshed(state, i, group) for i in sides_of(state)}

    def _refreshed(self, state: dict[str, Tensor], side: int, group: Mapping[str, Any]) -> Tensor:
        old = state[f"basis.{side}"]
        cov = state[f"cov.{side}"]
        cov = mirror_(cov.to(torch.promote_types(cov.dtype, old.dtype), copy=True))
        old = old.to(cov.dtype)
        basis = eigenbasis(cov) if group["basis"] == "eigh" else follow(cov, old)
        if group["tolerance"]:
            fits = offdiagonal(cov, old) <= group["tolerance"]
            basis = torch.where(fits[:, None, None], old, basis)
        return known_only(basis, f"basis.{side}", state)

    def install(
        self, fresh: dict[str, Tensor], state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        """What lives in the basis turns with it: R = Q_oldᵀ Q_new, M ← RᵀM, E ← (R⊙R)ᵀE.

        The last is exact for a permutation, and for uncorrelated coordinates.
        """
        for key, basis in fresh.items():
            dim = int(key[6:]) - (state["variance"].ndim - 1)
            turn = basis.mT @ state[key]
            state["rotated"].copy_(multiply(state["rotated"], turn, dim))
            state["variance"].copy_(multiply(state["variance"], turn.square_(), dim))
            state[key].copy_(basis)

    def direction(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        bases = [state.get(f"basis.{i}") for i in range(grad.ndim - 1)]
        eigen = KronEigen(tuple(bases), state["variance"])
        turned = eigen.rotate(grad)
        second_moment_(state["variance"], turned, beta2)
        variance = corrected(state["variance"], beta2, state, group)
        deviation, step = variance.sqrt().add_(group["eps"]), counted(state, group)
        moment = first_moment_(state["rotated"], turned, beta1, False, step)
        return eigen.unrotate(moment / deviation)


def _factor_beta(group: Mapping[str, Any]) -> float:
    beta = group["factor_beta"]
    return group["betas"][1] if beta is None else beta
