"""How much training on an example lowers the loss of a query: ⟨∇_q, H⁻¹ ∇_t⟩, summed over layers.

H is the curvature, damped. Positive: a proponent. Koh & Liang 1703.04730, Grosse et al. 2308.03296.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.collect import collect
from isokron.attribution.encoding import Encoder, Encoding
from isokron.attribution.subject import Subject
from isokron.curvature import Curvature
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.curvature.sites import Site

MEMORY = 256 * 2**20  # bytes of a store that are read at a time


def gradients(
    model: nn.Module, batches: Iterable[Any], loss: Loss | Likelihood, sites: list[Site]
) -> tuple[dict[str, Tensor], Tensor]:
    """Whole gradients of examples by layer, [N, B, o, i] each, and their losses [N]."""
    plain = Encoding({site.name: Encoder(site) for site in sites})
    rows: list[Tensor] = []
    losses: list[Tensor] = []

    def take(own: Tensor, of: Tensor) -> None:
        rows.append(own)
        losses.append(of)

    collect(model, batches, loss, plain, take)
    parts = torch.cat(rows).split([each.size for each in plain.encoders.values()], 1)
    named = zip(plain.encoders.items(), parts, strict=True)
    found = {name: part.unflatten(1, each.shape) for (name, each), part in named}
    return found, torch.cat(losses)


def preconditioned(inverse: Curvature, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """H⁻¹∇ of every example. [N, B, o, i] by layer"""
    return {
        name: torch.stack([inverse[name].apply(each) for each in matrices])
        for name, matrices in found.items()
    }


def encoded(encoding: Encoding, found: dict[str, Tensor]) -> Tensor:
    """Rows [N, D] of gradients by layer."""
    count = len(next(iter(found.values())))
    rows = torch.zeros(count, encoding.width)
    for name, encoder in encoding.encoders.items():
        encoding.place_(rows, name, encoder.matrices(found[name]))
    return rows


def on_oneself(
    subject: Subject, inverse: Curvature | None, batches: Iterable[Any] | None = None
) -> tuple[Tensor, Tensor]:
    """⟨∇_t, H⁻¹∇_t⟩ of every training example, or of those in batches, and its loss: [N] each. None
    for H = I."""
    found, losses = [], []
    for batch in subject.batches() if batches is None else batches:
        own, of = gradients(subject.model, [batch], subject.loss, subject.sites)
        turned = own if inverse is None else preconditioned(inverse, own)
        total = torch.zeros_like(of)
        for name, each in own.items():
            total += (each * turned[name]).flatten(1).sum(1)
        found.append(total)
        losses.append(of)
    if not found:
        return torch.empty(0), torch.empty(0)
    return torch.cat(found), torch.cat(losses)
