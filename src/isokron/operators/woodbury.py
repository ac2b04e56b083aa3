"""Woodbury on the output side of K-FAC: T gradients in place of an o×o covariance, T < o."""

import math

import torch
from torch import Tensor

from isokron.linalg.cholesky import factorize
from isokron.operators.lowrank import LowRank
from isokron.operators.storage import gram, pieces, store, wide

POLICIES = ("all", "hybrid", "auto", "none")


def woodbury_policy(
    outputs: int,
    terms: int,
    policy: str = "auto",
    *,
    rho: float = 0.75,
    t_max: int = 8192,
    large: int = 16384,
) -> bool:
    """Whether the output side of a layer is kept as its T gradients instead of o×o.

    "auto":   T ≤ ρ·o, where it is cheaper than Cholesky, and T ≤ t_max, whose T×T still fits.
    "hybrid": o > large, of which a covariance in float32 takes more than 1 GiB.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}")
    for name, value in (("outputs", outputs), ("terms", terms), ("rho", rho), ("t_max", t_max)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")
    if policy == "auto":
        return terms <= rho * outputs and terms <= t_max
    return policy == "all" or (policy == "hybrid" and outputs > large)


def gradient_factor(
    gradients: Tensor,
    terms: int | None = None,
    *,
    store_dtype: torch.dtype | None = None,
    storage: str = "auto",
) -> LowRank:
    """G = Σ g̃g̃ᵀ/T as LowRank, T = `terms` (the columns). gradients: [..., o, T], one a loss term.

    Kept as g̃/√T, which half precision can hold.
    """
    terms = _terms(gradients, terms)
    columns = _columns(gradients, terms, store_dtype, storage)
    zeros = torch.zeros((*gradients.shape[:-2], 1), dtype=torch.float64, device=gradients.device)
    return LowRank(zeros, columns)


def softmax_factor(
    probabilities: Tensor,
    terms: int | None = None,
    *,
    store_dtype: torch.dtype | None = None,
    storage: str = "auto",
) -> LowRank:
    """The true Fisher diag(p̄) − PPᵀ/T of a softmax. probabilities: [..., o, T], columns of sum 1.

    Columns of zeros are padding. p̄ is taken as U(Uᵀ1), U = P/√T as stored: then G·1 = 0 and G ≥ 0
    whatever half precision has made of U, since Σᵢⱼ (UUᵀ)ᵢⱼ (xᵢ − xⱼ)²/2 is its quadratic form.
    """
    terms = _terms(probabilities, terms)
    sums = probabilities.sum(-2, dtype=wide(probabilities.dtype))
    good = ((sums - 1).abs() < 0.02) | (sums == 0)
    if not (good.all() and (probabilities >= 0).all()):
        raise ValueError(
            f"probabilities must be at least 0 with columns of sum 1, got values from "
            f"{probabilities.min().item():.3g} and sums from {sums.min().item():.3g} to "
            f"{sums.max().item():.3g}; give softmax(logits) as [..., outputs, terms]"
        )
    columns = _columns(probabilities, terms, store_dtype, storage)
    return centered_factor(columns, probabilities.device)


def centered_factor(columns: Tensor, device: torch.device | None = None) -> LowRank:
    """diag(UUᵀ1) − UUᵀ, U ≥ 0: positive, and zero on what is constant. columns U: [..., o, T]"""
    device = columns.device if device is None else device
    total = columns.sum(-2, dtype=torch.float64).to(device).unsqueeze(-1)
    parts = pieces(columns, device, torch.float64)
    mean = torch.cat([part @ total for _, part in parts], -2).squeeze(-1)
    return LowRank(mean, columns, -1)


def push_through(
    gradients: Tensor, inputs: Tensor, damping: float, terms: int | None = None
) -> Tensor:
    """(λI + UUᵀ/T)⁻¹ V = U (λI + UᵀU/T)⁻¹ Āᵀ/T for V = UĀᵀ/T. U: [..., o, T], Ā: [..., i, T]

    V lies in the span of U, where Woodbury's Y − U(…)⁻¹UᵀY is a small difference of large terms;
    here nothing is subtracted. UᵀU is float64: in float32 it forgets what columns share.
    With columns g̃/√T of a LowRank: inputs ā/√T and terms 1.
    """
    if gradients.shape[:-2] != inputs.shape[:-2] or gradients.shape[-1] != inputs.shape[-1]:
        raise ValueError(
            f"push_through needs gradients [..., o, T] and inputs [..., i, T], got shapes "
            f"{tuple(gradients.shape)} and {tuple(inputs.shape)}"
        )
    if not 0 < damping < math.inf:
        raise ValueError(f"damping must be positive, got {damping!r}: without it UUᵀ is singular")
    terms = _terms(gradients, terms)
    small = gram(gradients, gradients.device) / terms
    solved = factorize(small, damping, name="UᵀU/T").solve(inputs.mT.double() / terms)
    return gradients @ solved.to(gradients.dtype)


def _columns(matrix: Tensor, terms: int, dtype: torch.dtype | None, storage: str) -> Tensor:
    """U/√T, rounded once: in half precision the quotient would underflow unseen."""
    scaled = matrix.to(wide(matrix.dtype)) / math.sqrt(terms)
    return store(scaled, matrix.dtype if dtype is None else dtype, storage)


def _terms(columns: Tensor, terms: int | None) -> int:
    terms = columns.size(-1) if terms is None else terms
    if terms < 1:
        raise ValueError(f"terms must be at least 1, got {terms!r}: without a loss there is no G")
    return terms
