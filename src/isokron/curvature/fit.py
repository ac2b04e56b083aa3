"""A model and data become curvature: one operator a layer."""

from collections import Counter
from collections.abc import Iterable
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature import heads, statistics
from isokron.curvature.columns import Policy
from isokron.curvature.curvature import Curvature
from isokron.curvature.folding import Folding, Kept, check_finite
from isokron.curvature.layer import Layer
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.curvature.passes import Passes
from isokron.curvature.sites import Site, find_sites
from isokron.curvature.statistics import Sums, Uses
from isokron.linalg import eigh

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
    sites = find_sites(model, layers, strict)
    folding = Folding(sites, method, fisher, sharing, keeping, length_hint(batches))
    passes = Passes(model, batches, loss, fisher, dtype, seed, sites, batch_dim)
    terms = passes.over(folding.take, folding.end)
    found = folding.finished(terms)
    retries: dict[str, Counter[str]] = {site.name: Counter() for site in sites}
    if method == "ekfac":
        _correct_(found, sites, passes, folding.kept, terms, retries)
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
                dict(retries[site.name]),
            )
            for site in sites
        ]
    )


def _correct_(
    found: dict[str, dict[str, Tensor]],
    sites: list[Site],
    passes: Passes,
    kept: Kept,
    terms: float,
    retries: dict[str, Counter[str]],
) -> None:
    """EK-FAC: in the place of both sides their eigenbases, and Λ, of a second look at the data."""
    bases = {}
    for site in sites:
        if site.view.kind != "diagonal":
            own = found[site.name]
            # a side is gone before the next is decomposed
            sides = own.pop("output"), own.pop("input")
            bases[site.name] = _bases(sides, retries[site.name])
    sums = {name: Sums() for name in bases}

    def take(site: Site, uses: Uses) -> None:
        if uses.kind == "softmax":
            heads.eigenvalues_(sums[site.name], uses, bases[site.name])
        elif site.name in bases:
            statistics.eigenvalues_(sums[site.name], uses, bases[site.name], site.columns)

    if kept.uses is None:
        passes.over(take)
    else:
        with passes.plain():
            for site, uses in kept.uses:
                take(site, uses)
    for name, (left, right) in bases.items():
        by_column = "columns" in sums[name]
        values = sums[name]["columns"].mT if by_column else sums[name]["eigenvalues"]
        found[name]["eigenvalues"] = (values / terms).contiguous()
        found[name]["basis.output"] = left
        if right is not None:
            found[name]["basis.input"] = right
        check_finite(name, found[name])


def _bases(sides: tuple[Tensor, Tensor], retries: Counter[str]) -> tuple[Tensor, Tensor | None]:
    """Eigenbases of both sides; None for inputs that are numbers of columns."""
    output, inputs = sides
    left = eigh(output, retries)[1]
    return left, eigh(inputs, retries)[1] if inputs.ndim == 3 else None


def _check(**given: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, choices) in given.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")
