"""Passes over examples that give what a store keeps of each: a row, and its loss."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.encoding import Encoding
from isokron.curvature.likelihoods import Likelihood, Loss, terms_and_weights
from isokron.curvature.passes import Passes
from isokron.curvature.sites import Site
from isokron.curvature.statistics import Uses

# rows [n, D] or [n, S, D] of a batch, and the losses [n] of its examples
Take = Callable[[Tensor, Tensor], None]


class Recorded:
    """A loss that remembers what the examples of the last batch had: the sum of their terms."""

    def __init__(self, loss: Loss | Likelihood) -> None:
        self.loss = loss
        self.losses = torch.zeros(0)

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        terms, weights = terms_and_weights(_result(self.loss, model, batch))
        self.losses = (terms.detach() * weights).reshape(len(terms), -1).sum(1)
        return terms, weights


def _result(loss: Loss | Likelihood, model: nn.Module, batch: Any) -> Any:
    if not isinstance(loss, Likelihood):
        return loss(model, batch)
    outputs, targets = loss.forward(model, batch)
    return loss.terms(outputs, targets), loss.weights(targets)


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
    recorded = Recorded(loss)
    rows: list[Tensor] = []

    def fold(site: Site, uses: Uses) -> None:
        own = encoding.encoders[site.name].rows(uses, tokens)
        if not rows:
            rows.append(own.new_zeros(*own.shape[:-1], encoding.width))
        examples = len(recorded.losses)
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
        take(rows.pop(), recorded.losses)

    sites = [encoder.site for encoder in encoding.encoders.values()]
    passes = Passes(model, batches, recorded, "empirical", dtype, 0, sites, 0, masks=False)
    passes.over(fold, after)
