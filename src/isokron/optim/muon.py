"""Muon: momentum, orthogonalised (K. Jordan et al., 2024; scale of 2502.16982)."""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from isokron.optim.engine import Params, Preconditioned
from isokron.optim.settings import Shared
from isokron.optim.spectral import SCALES, spectral_direction
from isokron.polynomials import Choice, schedule


class Muon(Preconditioned):
    """W ← W − lr(scale · polar(M) + λW): steepest descent in the spectral norm.

    `scale`: "match_rms_adamw" is 0.2√max(m, n), after which one learning rate suits the matrices
    and the AdamW part alike; "original" is √max(1, m/n). A convolution [out, in, …] is the matrix
    [out, in·…]. `steps`, `coefficients`, `dtype`: of isokron.linalg.newton_schulz.
    `betas`: of AdamW, which steps everything that is not a matrix. `shared`: see docs/engine.md.
    """

    order = 2
    refresh_work = "polar"
    debias = False  # the polar factor does not depend on the moment's scale

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scale: str = "match_rms_adamw",
        steps: int = 5,
        coefficients: Choice | None = "classic",
        dtype: torch.dtype | None = None,
        graft: str | None = None,
        betas: tuple[float, float] = (0.9, 0.99),
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            scale=scale,
            steps=steps,
            coefficients=coefficients,
            dtype=dtype,
            graft=graft,
            betas=betas,
            **shared,
        )

    def check(self, group: Mapping[str, Any]) -> None:
        if group["scale"] not in SCALES:
            raise ValueError(f"Muon: scale must be one of {SCALES}, got {group['scale']!r}")
        schedule(group["coefficients"], group["steps"])

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        return spectral_direction(
            moment, group["scale"], group["steps"], group["coefficients"], group["dtype"]
        )
