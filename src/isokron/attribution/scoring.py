"""Scores of examples: from a store, or in passes over the data without one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.storage.store import Store
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.curvature.passes import Passes
from isokron.curvature.sites import Site
from isokron.curvature.statistics import Uses

MEMORY = 256 * 2**20  # bytes of a store that are read at a time
CHUNK = 2**22  # entries of gradients made at a time
TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Scores:
    """of: [Q, rows], or [Q, layers, rows] by layer, whose names are `layers`."""

    of: Tensor
    layers: tuple[str, ...] = ()


def score_store(
    store: Store,
    queries: Tensor,
    *,
    by_layer: bool = False,
    unit: bool = False,
    memory: int = MEMORY,
    shards: range | None = None,
) -> Scores:
    """⟨query, row⟩ of queries [Q, D] with all rows, read and multiplied block by block.

    `unit`: both are scaled to length 1. `shards`: with the rows of these neighbours only.
    """
    if queries.ndim != 2 or queries.size(1) != store.width:
        raise ValueError(
            f"queries must be [Q, {store.width}] for this store, got {tuple(queries.shape)}; "
            "encode them with the settings of the store"
        )
    if unit:
        queries = normalized(queries)
    layers = tuple(column.layer for column in store.plan.columns) if by_layer else ()
    parts = [store.columns(layer) for layer in layers] or [slice(None)]
    start, stop = (0, len(store)) if shards is None else store.span(shards)
    result = torch.empty(len(queries), len(parts), stop - start)
    for number, block in store.blocks(memory, shards):
        first, rows = number - start, block.float()
        lengths = _length(rows)[:, 0] if unit else None
        for k, part in enumerate(parts):
            own = queries[:, part] @ rows[:, part].mT
            own = own if lengths is None else own / lengths
            result[:, k, first : first + len(rows)] = own
    return Scores(result if by_layer else result[:, 0], layers)


def score_data(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | Likelihood,
    sites: list[Site],
    queries: dict[str, Tensor],
    *,
    by_layer: bool = False,
    tokens: bool = False,
    dtype: torch.dtype = torch.float32,
    part: int | None = None,
) -> Scores:
    """⟨V_q, ∇_t⟩ of matrices V by layer, [Q, B, o, i], with the gradients of all examples.

    `tokens`: by position, [Q, N, S] in the place of [Q, N], which all batches have as many of.
    Gradients of examples are made where that is less work than ⟨V, Σ_s g̃āᵀ⟩ = Σ_s g̃ᵀVā. `part`:
    the batches are some of all, maybe none, from this number on.
    """
    batch: dict[str, Tensor] = {}
    done: list[Tensor] = []

    def fold(site: Site, uses: Uses) -> None:
        batch[site.name] = _products(queries[site.name], site, uses, tokens)

    def after() -> None:
        found = [batch.pop(site.name) for site in sites if site.name in batch]
        if tokens:  # what has fewer positions, as a layer after pooling has, belongs to no token
            most = max(each.size(2) for each in found)
            found = [each for each in found if each.size(2) == most]
        done.append(torch.stack(found, 1) if by_layer else torch.stack(found).sum(0))

    passes = Passes(model, batches, loss, "empirical", dtype, 0, sites, 0, masks=False, part=part)
    passes.over(fold, after)
    layers = tuple(site.name for site in sites)
    if not done:
        count = len(next(iter(queries.values())))
        done.append(torch.empty(count, len(layers), 0) if by_layer else torch.empty(count, 0))
    return Scores(torch.cat(done, 2 if by_layer else 1), layers if by_layer else ())


def _products(queries: Tensor, site: Site, uses: Uses, tokens: bool) -> Tensor:
    """[Q, N] or [Q, N, S]. queries: [Q, B, o, i]"""
    if uses.kind == "diagonal":
        of = {"weight": uses.grads * uses.inputs, "bias": uses.grads}
        rows = torch.stack([of[key][0] for key in site.layout.params], 2)  # [N, S, o, i]
        found = torch.einsum("nsoi,qoi->qns", rows, queries[:, 0])
        return found if tokens else found.sum(2)
    if uses.kind == "index":
        numbers = uses.inputs[0].clamp_min(0)
        grads = uses.grads[0] * (uses.inputs[0] >= 0)[..., None]
        found = torch.stack([(grads * each[0].mT[numbers]).sum(-1) for each in queries])
        return found if tokens else found.sum(2)
    uses = uses.written()
    places, count = uses.grads.size(2), len(queries)
    if tokens or count * places <= count + places:
        found = torch.stack(
            [(uses.grads @ each[:, None] * uses.inputs).sum((0, 3)) for each in queries]
        )
        return found if tokens else found.sum(2)
    flat = queries.flatten(1)
    some = max(1, CHUNK // max(1, flat.size(1)))
    pairs = zip(uses.grads.split(some, 1), uses.inputs.split(some, 1), strict=True)
    made = ((g.mT @ a).movedim(0, 1).flatten(1) for g, a in pairs)
    return torch.cat([flat @ each.mT for each in made], 1)


def normalized(rows: Tensor) -> Tensor:
    """Rows of length 1, and those of zeros as they are."""
    return rows / _length(rows)


def _length(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(TINY)
