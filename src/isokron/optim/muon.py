"""Muon: momentum, orthogonalised (K. Jordan et al., 2024; scale of 2502.16982)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from isokron.optim.layout import Traits, full_rank_norm, matrices_of
from isokron.optim.preconditioned import Params, Preconditioned
from isokron.optim.settings import (
    Average,
    Graft,
    Nonfinite,
    checked_keywords,
    keywords_of,
    require,
)
from isokron.optim.spectral import spectral_direction, spectral_scale
from isokron.polynomials import Choice, schedule


class Muon(Preconditioned):
    """W ← W − lr(scale · polar(M) + λW): steepest descent in the spectral norm.

    A convolution [out, in, …] is the matrix [out, in·…]. What is not a matrix goes to AdamW.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate.
        momentum: Decay rate of M.
        nesterov: Take (1−β)G + βM in place of M.
        weight_decay: λ.
        scale: "match_rms_adamw" is 0.2√max(m, n), with which one learning rate suits the matrices
            and AdamW's part; "original" is √max(1, m/n), None is 1.
        steps: Newton-Schulz iterations.
        coefficients: Of the iteration; see isokron.linalg.newton_schulz.
        dtype: Of the iteration; None: bfloat16 on accelerators, float32 on CPU.
        graft: Take the step length of "sgd", "adagrad", "rmsprop" or "adam" instead.
        betas: Of AdamW and of grafting.
        eps: Of AdamW and of grafting.
        average: "schedule_free" or "primal" averages of the iterates; see docs/engine.md.
        nonfinite: On a gradient that is not finite: "raise", "skip" the step or "ignore" it.
    """

    @checked_keywords()
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scale: Literal["match_rms_adamw", "original"] | None = "match_rms_adamw",
        steps: int = 5,
        coefficients: Choice | None = "classic",
        dtype: torch.dtype | None = None,
        graft: Graft = None,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        average: Average = None,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        settings = keywords_of(locals())
        # the polar factor does not depend on the moment's scale
        traits = Traits(
            cut=matrices_of,
            check=check_muon,
            debias=False,
            work="polar",
            norm=muon_norm,
        )
        super().__init__(params, lr, traits, **settings)

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        return spectral_direction(
            moment, group["scale"], group["steps"], group["coefficients"], group["dtype"]
        )


def muon_norm(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """The spectral norm of an update; a grafted one has the RMS of the other method."""
    if group["graft"]:
        return full_rank_norm(shape, group)
    rows, cols = shape
    return spectral_scale(rows, cols, group["scale"])


def check_muon(group: Mapping[str, Any]) -> None:
    rule = "False for a method of matrices; vectors go to AdamW"
    require(not group["vectors"], "Muon", group, "vectors", rule)
    schedule(group["coefficients"], group["steps"])
