"""A model and data become curvature: one operator a layer."""

import json
from collections import Counter
from collections.abc import Iterable
from operator import length_hint
from typing import Any

import torch
from torch import nn

from isokron.curvature.columns import Columns, Policy
from isokron.curvature.correction import correct_, decompose_
from isokron.curvature.curvature import Curvature
from isokron.curvature.division import Division, owners
from isokron.curvature.folding import Folding, means
from isokron.curvature.layer import Layer
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.curvature.passes import Passes, check
from isokron.curvature.settling import settled, shared, total
from isokron.curvature.sites import Site, find_sites
from isokron.curvature.statistics import Sums

METHODS = ("kfac", "ekfac", "tkfac", "shampoo")
FISHERS = ("empirical", "sampled", "exact")
SHARINGS = ("expand", "reduce")


def fit(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | Likelihood,
    method: str = "kfac",
    *,
    fisher: str = "empirical",
    sharing: str = "expand",
    layers: Iterable[str] | str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    strict: bool = False,
    batch_dim: int = 0,
    policy: str = "none",
    rho: float = 0.75,
    t_max: int = 8192,
    store: str = "auto",
    store_dtype: torch.dtype | None = None,
    division: Division | None = None,
) -> Curvature:
    """The Fisher of a model's layers, F ≈ Σ ∇∇ᵀ / M over examples, M the terms of the loss.

    `loss(model, batch)`: one loss a term, of any shape, or these and weights of 0 for terms that do
    not count. `fisher`: gradients of the data's labels ("empirical"), of labels drawn from the
    model ("sampled", by `seed`), or of all labels ("exact", as many backward passes as an example
    has outputs); the last two need a likelihood, such as isokron.curvature.CrossEntropy. `sharing`:
    positions that share a weight count one by one ("expand") or are taken together ("reduce") in
    the factors of K-FAC and TKFAC; gradients of whole examples, of which Shampoo's factors and
    EK-FAC's eigenvalues are made, are the same for both. `layers`: patterns of names. `batch_dim`:
    the dimension of inputs that counts examples. The model is used as it stands: call model.eval()
    before, if dropout is to be off. EK-FAC goes over the data twice, with labels drawn anew for its
    eigenvalues: those of the draws that its bases were made of would be too large along these.

    `policy`: the output side of o outputs is a covariance ("none"), or the T gradients that make
    one up, of which inverses and powers then are made by Woodbury's identity: always ("all"), for
    more than 16384 outputs ("hybrid"), or while T ≤ rho·o and T ≤ t_max ("auto"). `store`: they are
    kept on the model's device, on the "host", or on the device up to 500 MB ("auto");
    `store_dtype`: in float32, bfloat16 or float16, by default in `dtype`.

    `division`: sums are made in an order that is the same on one process and on many, which then
    share the batches: these must have a length, and slices if there are many.
    """
    _check(method=(method, METHODS), fisher=(fisher, FISHERS), sharing=(sharing, SHARINGS))
    if fisher != "empirical" and not isinstance(loss, Likelihood):
        raise ValueError(
            f"fisher={fisher!r} needs a loss that knows its distribution, got {loss!r}; give "
            "CrossEntropy(), SquaredError(), BinaryCrossEntropy() or a Likelihood of your own"
        )
    if method == "ekfac" and iter(batches) is batches:
        raise ValueError(
            "batches must be something to go over twice for method='ekfac', such as a list or a "
            f"DataLoader, got {type(batches).__name__}"
        )
    keeping = Policy(policy, rho, t_max, store, store_dtype)
    if method == "ekfac" and policy != "none":
        raise ValueError(
            f"policy={policy!r} keeps gradients in place of the output side, and method='ekfac' "
            "needs all eigenvectors of it; use policy='none', or method='kfac'"
        )
    if division is not None and policy != "none":
        raise ValueError(
            f"policy={policy!r} keeps the gradients of all batches in their order, and a division "
            "adds up parts of them; use policy='none', or no division"
        )
    if division is not None and not hasattr(batches, "__len__"):
        raise ValueError(
            "batches must have a length to be divided into segments, such as a list has, got "
            f"{type(batches).__name__}; give such, or no division"
        )
    division = division or Division(segments=1)
    sites = find_sites(model, layers, strict)
    count = length_hint(batches)
    first, own = division.part(batches)
    folding = Folding(sites, method, fisher, sharing, keeping, count, division)
    part = first if division.segments > 1 else None
    passes = Passes(model, own, loss, fisher, dtype, seed, sites, batch_dim, part=part)
    with division.together("a pass over the data"):
        passes.over(folding.take, lambda: folding.end(passes.count))
        tree = folding.segments.finish()
    terms = total(division, tree)
    check(terms, [])
    device = next(model.parameters()).device
    layers_of = owners({site.name: _cost(site) for site in sites}, division.size)
    sums = settled(division, tree, layers_of, device)
    retries = {name: Counter[str]() for name in sums}
    with division.together("the statistics of layers"):
        check(terms, [name for name in sums if not _seen(sums[name])])
        found = {}
        for name in list(sums):
            found[name] = means(name, sums.pop(name), terms)
            if method == "ekfac" and "output" in found[name]:
                decompose_(found[name], retries[name])
    found = shared(division, found, layers_of, device)
    if method == "ekfac":
        correct_(found, sites, passes, folding, terms, layers_of)
    tried = _all_of(division, retries)
    return Curvature(
        [
            Layer(
                site.name,
                method,
                site.view.kind,
                site.layout,
                found[site.name],
                policy,
                terms,
                tried[site.name],
            )
            for site in sites
        ]
    )


def _all_of(division: Division, retries: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    """Everybody's retries, by layer."""
    own = {name: dict(counts) for name, counts in retries.items()}
    if division.workers is None:
        return own
    every = [json.loads(text) for text in division.workers.texts(json.dumps(own))]
    return {name: counts for each in every for name, counts in each.items()}


def _seen(sums: Sums) -> bool:
    return bool(sums) or (isinstance(sums, Columns) and any(sums.rows.values()))


def _cost(site: Site) -> float:
    """Of eigenvectors, but for a factor."""
    blocks, outputs, inputs = site.layout.shape
    return blocks * (outputs**3 + (inputs**3 if site.view.kind == "dense" else inputs))


def _check(**given: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, choices) in given.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")
