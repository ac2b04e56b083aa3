"""Muon: momentum, orthogonalised (K. Jordan et al., 2024; scale of 2502.16982)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.linalg import newton_schulz
from isokron.linalg.polar import Coefficients, schedule
from isokron.optim.engine import Params, Preconditioned

SCALES = ("match_rms_adamw", "original")


class Muon(Preconditioned):
    """W ← W − lr(scale · polar(M) + λW): steepest descent in the spectral norm.

    `scale`: "match_rms_adamw" is 0.2√max(m, n), after which one learning rate suits the matrices
    and the AdamW part alike; "original" is √max(1, m/n). A convolution [out, in, …] is the matrix
    [out, in·…]. `steps`, `coefficients`, `dtype`: of isokron.linalg.newton_schulz.
    `betas`, `eps`: of AdamW, which steps everything that is not a matrix.
    """

    order = 2
    debias = False  # the polar factor does not depend on the moment's scale

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        decay: str = "decoupled",
        scale: str = "match_rms_adamw",
        steps: int = 5,
        coefficients: str | Coefficients | Sequence[Coefficients] = "classic",
        dtype: torch.dtype | None = None,
        graft: str | None = None,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            decay=decay,
            scale=scale,
            steps=steps,
            coefficients=coefficients,
            dtype=dtype,
            graft=graft,
            betas=betas,
            eps=eps,
            maximize=maximize,
            nonfinite=nonfinite,
        )

    def check(self, group: Mapping[str, Any]) -> None:
        if group["scale"] not in SCALES:
            raise ValueError(f"Muon: scale must be one of {SCALES}, got {group['scale']!r}")
        schedule(group["coefficients"], group["steps"])

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        orthogonal = newton_schulz(
            moment, group["steps"], group["coefficients"], dtype=group["dtype"]
        )
        return orthogonal * _scale(group["scale"], *moment.shape[-2:])


def _scale(kind: str, rows: int, cols: int) -> float:
    if kind == "original":
        return math.sqrt(max(1, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))
