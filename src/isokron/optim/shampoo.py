"""Shampoo: one factor a dimension, each an inverse root (Gupta et al., 1802.09568)."""

from collections.abc import Mapping
from math import prod
from typing import Any, Unpack

import torch
from torch import Tensor

from isokron.exponents import Exponent, check_root, exponents
from isokron.linalg import eigh, inverse_power, inverse_root, mirror_, offdiagonal
from isokron.operators import Dense, Eigen, Factor, Identity, Kron
from isokron.optim.blocks import Batch
from isokron.optim.covariances import (
    debiased,
    known_only,
    observe_side_,
    sides_of,
    zero_covariances,
)
from isokron.optim.engine import Params, Preconditioned
from isokron.optim.groups import check_factors, check_number
from isokron.optim.settings import HeavyBall

FORMS = ("root", "eigen")
STATISTICS = ("gradient", "kl")


class Shampoo(Preconditioned):
    """P = M̂ ×_1 A_1 … ×_k A_k, A_i = (F̂_i + εI)^(−1/p), F_i the second moment along dimension i.

    `factor_beta`: of F; 1 sums as AdaGrad does. `damping`: ε. `deficient`: ε is "relative" to the
    mean eigenvalue, or by "lift" absolute; "pseudo", with ε = 0, is the pseudo-inverse.
    `exponent`: p; a number, or {order: number or one a dimension}; 0 leaves a dimension alone,
    None is twice the order of a block, as first published.
    `form`: keep roots, or with "eigen" eigenvalues and eigenvectors. `solver`: of roots, see
    isokron.linalg.inverse_root. `tolerance`: with "eigen", a basis that diagonalises F̂ to this
    relative error is not refreshed. `statistic`: "kl" contracts gradients that the other sides have
    preconditioned (KL-Shampoo, 2509.03378). `factor_dtype`: of F. `shared`: see docs/engine.md.
    """

    heavy_ball = True
    squares = True
    operator = ("root", "values", "basis")
    shaping = ("form", "exponent", "factor_dtype", "statistic")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        factor_beta: float = 0.95,
        damping: float = 1e-4,
        deficient: str = "relative",
        exponent: Exponent = 2,
        form: str = "root",
        solver: str = "eigh",
        tolerance: float = 0.0,
        statistic: str = "gradient",
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
            damping=damping,
            deficient=deficient,
            exponent=exponent,
            form=form,
            solver=solver,
            tolerance=tolerance,
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
                raise ValueError(f"Shampoo: {name} must be one of {choices}, got {group[name]!r}")
        check_factors("Shampoo", group)
        check_number("Shampoo", "tolerance", group["tolerance"])
        if group["tolerance"] and group["form"] != "eigen":
            raise ValueError(
                f"Shampoo: tolerance must be 0 for form='root', got {group['tolerance']!r}; only "
                "form='eigen' keeps the basis that it is about"
            )
        if group["solver"] != "eigh" and group["form"] == "eigen":
            raise ValueError(
                f"Shampoo: solver must be 'eigh' for form='eigen', got {group['solver']!r}"
            )
        for order in range(1, 5):
            for root in exponents(group, order):
                if root:
                    check_root(
                        root, group["damping"], solver=group["solver"], deficient=group["deficient"]
                    )

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        roots = exponents(group, len(batch.shape))
        sides = [i for i in range(len(batch.shape)) if roots[i]]
        state = zero_covariances(batch, sides, group["factor_dtype"])
        for i in sides:
            eyes = batch.eyes(batch.shape[i])
            if group["form"] == "root":
                state[f"root.{i}"] = eyes
            else:
                one = {"lift": 1 - group["damping"], "relative": 1 / (1 + group["damping"])}
                values = one.get(group["deficient"], 1.0)  # of which, damped, every root is 1
                state[f"values.{i}"] = torch.full_like(eyes[..., 0], values)
                state[f"basis.{i}"] = eyes
        return state

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        if group["statistic"] == "gradient":
            for i in sides_of(state):
                observe_side_(state[f"cov.{i}"], grad, i, group["factor_beta"])
            return
        factors = self._factors(state, group, grad.ndim - 1)
        for i in sides_of(state):
            others = [Identity() if j == i else factor for j, factor in enumerate(factors)]
            white = Kron(tuple(others)).apply(grad)
            scale = grad.size(i + 1) / prod(grad.shape[1:])
            observe_side_(state[f"cov.{i}"], white, i, group["factor_beta"], scale)

    def refresh(self, state: dict[str, Tensor], group: Mapping[str, Any]) -> dict[str, Tensor]:
        beta, fresh = group["factor_beta"], {}
        for i in sides_of(state):
            cov = debiased(state, i, beta, group)
            if group["form"] == "root":
                root = exponents(group, state["step"].ndim - 1)[i]
                solver, deficient = group["solver"], group["deficient"]
                fresh[f"root.{i}"] = inverse_root(
                    cov, root, group["damping"], solver=solver, deficient=deficient
                )
            else:
                fresh[f"values.{i}"], fresh[f"basis.{i}"] = self._decomposed(cov, i, state, group)
        return {key: known_only(value, key, state) for key, value in fresh.items()}

    def _decomposed(
        self, cov: Tensor, side: int, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors; a basis that still fits gets the newest eigenvalues."""
        old = state[f"basis.{side}"]
        if not group["tolerance"]:
            return eigh(cov)
        cov = mirror_(cov.to(torch.promote_types(cov.dtype, old.dtype), copy=True))
        basis = old.to(cov.dtype, copy=True)
        stale = ~(offdiagonal(cov, basis) <= group["tolerance"])
        values = (basis * (cov @ basis)).sum(-2)
        values[stale], basis[stale] = eigh(cov[stale])
        return values, basis

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        return Kron(self._factors(state, group, moment.ndim - 1)).apply(moment)

    def _factors(
        self, state: Mapping[str, Tensor], group: Mapping[str, Any], order: int
    ) -> tuple[Factor, ...]:
        factors: list[Factor] = [Identity()] * order
        for i in sides_of(state):
            if group["form"] == "root":
                factors[i] = Dense(state[f"root.{i}"])
            else:
                root, values = exponents(group, order)[i], state[f"values.{i}"]
                powers = inverse_power(values, root, group["damping"], group["deficient"])
                factors[i] = Eigen(powers, state[f"basis.{i}"])
        return tuple(factors)
