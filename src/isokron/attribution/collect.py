"""Passes over examples that give what a store keeps of each: a row, and its loss."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.encoding import Encoding
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.curvature.passes import Passes
from isokron.curvature.sites import Site
from isokron.curvature.statistics import Uses

# rows [n, D] or [n, S, D] of a batch, and the losses [n] of its examples
Take = Callable[[Tensor, Tensor], None]


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | Likelihood,
    encoding: Encoding,
    take: Take,
    *,
    tokens: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give the rows of every batch to `take`. An example's gradient is that of the sum of its
    terms; `tokens`: its parts by position, which all layers must have as many of."""
    rows: list[Tensor] = []

    def fold(site: Site, uses: Uses) -> None:
        own = encoding.encoders[site.name].rows(uses, tokens)
        if not rows:
            rows.append(own.new_zeros(*own.shape[:-1], encoding.width))
        examples = len(passes.losses)
        if len(own) != examples:
            raise ValueError(
                f"layer {site.name!r} saw {len(own)} examples in a batch of {examples}; keep "
                "examples apart in the first dimension of its inputs, or leave it out of `layers`"
            )
        if own.shape[:-1] != rows[0].shape[:-1]:
            raise ValueError(
                f"layer {site.name!r} has {own.size(1)} positions an example, others have "
                f"{rows[0].size(1)}; rows by token need as many in all layers: name such `layers`"
            )
        encoding.place_(rows[0], site.name, own)

    def after() -> None:
        take(rows.pop(), passes.losses)

    sites = [encoder.site for encoder in encoding.encoders.values()]
    passes = Passes(model, batches, loss, "empirical", dtype, 0, sites, 0, masks=False, record=True)
    passes.over(fold, after)
