"""Skew: momentum made white by factors that are turned toward symmetric as they learn."""

import torch
from torch import Tensor

from isokron.linalg import norm_bound
from isokron.optim.white_kron import WhiteKron
from isokron.optim.whitening import Pull


class Skew(WhiteKron):
    """P μ̂ with P = QlᵀQl ⊗ QrᵀQr, and Q ← MQ, M = I − plr/L·(T − t₂I), then a Procrustes step.

    It takes what Quad takes, and its factors move faster: see docs/white_kron.md.
    """

    symmetric = False
    pace = 1.0

    def move_dense(self, factor: Tensor, pull: Pull, probes: Tensor) -> Tensor:
        return procrustes(pull.before(factor), probes)

    def move_diagonal(self, factor: Tensor, pull: Tensor) -> Tensor:
        return factor * pull


def procrustes(factor: Tensor, probes: Tensor) -> Tensor:
    """Q ← Q + a(RQ + ½aRRQ), R = (Qᵀ − Q)/max|Qᵀ − Q|: turns Q toward symmetric positive.

    a = (1/8)/‖R‖, and no more than −tr(RQ)/tr(RRQ), where the trace of Q is largest. [B, n, n]
    """
    back = factor - factor.mT  # −R, whose rows are in memory as those of Q are
    top = back.abs().amax((1, 2))
    back /= torch.where(top > 0, top, 1)[:, None, None]
    turned = back @ factor
    # tr(RX) = Σ Rᵢⱼ Xⱼᵢ and Rᵢⱼ = −Rⱼᵢ
    slope, bend = _dot(back, factor), -_dot(back, turned)
    norm = norm_bound(back, torch.ones_like(top), -probes)  # from where R and probes would lead
    angle = 1 / (8 * torch.where(norm > 0, norm, 1))
    angle = torch.where(bend < 0, angle.minimum(slope / torch.where(bend < 0, -bend, 1)), angle)
    angle = torch.where(slope > 0, angle, 0)[:, None, None]
    return factor.addcmul(turned, -angle).addcmul_(back @ turned, angle.square() / 2)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Σ XᵢⱼYᵢⱼ, without the product in between. [B, n, n] → [B]"""
    return (one.flatten(1).unsqueeze(1) @ other.flatten(1).unsqueeze(2)).flatten()
