"""A model and data become curvature: one operator a layer."""

from collections.abc import Iterable
from dataclasses import replace
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature import heads, statistics
from isokron.curvature.columns import Columns, Policy
from isokron.curvature.curvature import Curvature
from isokron.curvature.layer import Layer
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.curvature.passes import Passes
from isokron.curvature.sites import Site, find_sites
from isokron.curvature.statistics import Sums, Uses, either, mirrored, reduced
from isokron.linalg import eigh

METHODS = ("kfac", "ekfac", "tkfac", "shampoo")
FISHERS = ("empirical", "sampled", "exact")
SHARINGS = ("expand", "reduce")
KEPT = 2**26  # bytes of inputs and gradients that are kept for a second look, to save a second pass


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
    before, if dropout is to be off. EK-FAC goes over the data twice.

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
    sums = {site.name: Columns(keeping) for site in sites}
    kept: list[tuple[Site, Uses]] | None = [] if method == "ekfac" else None
    size, done, expected = 0, 0, length_hint(batches)  # 0 where no length is known
    waiting: dict[str, tuple[Site, Uses]] = {}

    def first(site: Site, uses: Uses) -> None:
        nonlocal kept, size
        own = sums[site.name]
        shared = reduced(uses) if sharing == "reduce" else uses
        if uses.kind == "softmax":
            if method in ("kfac", "ekfac"):
                heads.covariance_(own, uses)
                waiting[site.name] = site, uses
            else:
                heads.traced_(own, uses, sharing if method == "tkfac" else "expand")
            kept = None
            return
        if uses.kind == "diagonal":
            statistics.diagonal_(own, uses, list(site.layout.params))
        elif method in ("kfac", "ekfac") and fisher == "exact":
            statistics.output_covariance_(own, shared)
            waiting[site.name] = site, either(waiting.get(site.name, (site, None))[1], uses)
        elif method in ("kfac", "ekfac"):
            statistics.covariances_(own, shared, site.columns)
        elif method == "tkfac":
            statistics.traced_(own, shared, site.columns)
        else:
            statistics.gradients_(own, uses, site.columns)
        if kept is not None and uses.kind != "diagonal":
            size += uses.inputs.nbytes + uses.grads.nbytes
            # a copy of inputs, for they may lie in memory that the next batch writes to
            again = replace(uses, inputs=uses.inputs.clone())
            # what will not all fit is dropped at once, and not when half of the data are held
            fits = size <= KEPT and size * expected <= KEPT * (done + 1)
            kept = [*kept, (site, again)] if fits else None

    def inputs() -> None:
        """Inputs count once, however many passes went back from them."""
        nonlocal done
        done += 1
        for site, uses in waiting.values():
            shared = reduced(uses) if sharing == "reduce" else uses
            statistics.input_covariance_(sums[site.name], shared, site.columns)
        waiting.clear()

    go = Passes(model, batches, loss, fisher, dtype, seed, sites, batch_dim)
    terms = go.over(first, inputs)
    found = {site.name: _finished(site, sums[site.name], method, terms) for site in sites}
    if method == "ekfac":
        bases = {s.name: _bases(found[s.name]) for s in sites if s.view.kind != "diagonal"}
        second = {name: Sums() for name in bases}

        def correct(site: Site, uses: Uses) -> None:
            if uses.kind == "softmax":
                heads.eigenvalues_(second[site.name], uses, bases[site.name])
            elif site.name in bases:
                pair = bases[site.name]
                statistics.eigenvalues_(second[site.name], uses, pair, site.columns)

        if kept is None:
            go.over(correct)
        else:
            with go.plain():
                for site, uses in kept:
                    correct(site, uses)
        for name, pair in bases.items():
            found[name].update(_eigen(second[name], pair, terms))
            _check_finite(name, found[name])
    return Curvature(
        [
            Layer(site.name, method, site.view.kind, site.layout, found[site.name], policy, terms)
            for site in sites
        ]
    )


def _finished(site: Site, sums: Columns, method: str, terms: float) -> dict[str, Tensor]:
    """Sums made means: by the positions for inputs of K-FAC, by the terms for all others."""
    columns = sums.kept(terms)
    found = mirrored(sums)
    if "softmax" in found:
        found["output"] = heads.output_side(found)
    places = found.pop("places", None)
    for name, value in found.items():
        by = float(places) if name == "input" and places is not None else terms
        found[name] = value.div_(by)
    found.update(columns)
    _check_finite(site.name, found)
    return found


def _check_finite(layer: str, found: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if not bool(torch.stack(value.aminmax()).isfinite().all()):  # without a copy of it
            raise FloatingPointError(
                f"layer {layer!r}: {name} statistics are not finite; look for NaN or Inf in the "
                "data, or for losses that overflow in half precision"
            )


def _bases(found: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Eigenbases of both sides; None for inputs that are numbers of columns."""
    left = eigh(found["output"])[1]
    return left, eigh(found["input"])[1] if found["input"].ndim == 3 else None


def _eigen(
    sums: Sums, bases: tuple[Tensor | None, Tensor | None], terms: float
) -> dict[str, Tensor]:
    by_column = "columns" in sums
    values = sums["columns"].mT.contiguous() if by_column else sums["eigenvalues"]
    names = ("basis.output", "basis.input")
    return {
        "eigenvalues": values / terms,
        **{name: basis for name, basis in zip(names, bases, strict=True) if basis is not None},
    }


def _check(**given: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, choices) in given.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")
