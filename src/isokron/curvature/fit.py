"""A model and data become curvature: one operator a layer."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature import statistics
from isokron.curvature.capture import Event, Watcher
from isokron.curvature.curvature import Curvature, Layer
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.curvature.sites import Site, find_sites
from isokron.curvature.statistics import Sums, Uses, either, joined, mirrored, reduced
from isokron.linalg import eigh

METHODS = ("kfac", "ekfac", "tkfac", "shampoo")
FISHERS = ("empirical", "sampled", "exact")
SHARINGS = ("expand", "reduce")
KEPT = 2**26  # bytes of inputs and gradients that are kept for a second look, to save a second pass

Fold = Callable[[Site, Uses], None]


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
    sites = find_sites(model, layers, strict)
    sums = {site.name: Sums() for site in sites}
    kept: list[tuple[Site, Uses]] | None = [] if method == "ekfac" else None
    size = 0
    waiting: dict[str, tuple[Site, Uses]] = {}

    def first(site: Site, uses: Uses) -> None:
        nonlocal kept, size
        own = sums[site.name]
        shared = reduced(uses) if sharing == "reduce" else uses
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
            again = Uses(uses.inputs.clone(), uses.grads, uses.kind)
            kept = [*kept, (site, again)] if size <= KEPT else None

    def inputs() -> None:
        """Inputs count once, however many passes went back from them."""
        for site, uses in waiting.values():
            shared = reduced(uses) if sharing == "reduce" else uses
            statistics.input_covariance_(sums[site.name], shared, site.columns)
        waiting.clear()

    go = _Pass(model, batches, loss, fisher, dtype, seed, sites, batch_dim)
    terms = go.over(first, inputs)
    found = {site.name: _finished(site, sums[site.name], method, terms) for site in sites}
    if method == "ekfac":
        bases = {s.name: _bases(found[s.name]) for s in sites if s.view.kind != "diagonal"}
        second = {name: Sums() for name in bases}

        def correct(site: Site, uses: Uses) -> None:
            if site.name in bases:
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
    records = [Layer(s.name, method, s.view.kind, s.layout, found[s.name]) for s in sites]
    return Curvature(records)


class _Pass:
    """Passes over the data, the same each time: drawn labels included."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss | Likelihood,
        fisher: str,
        dtype: torch.dtype,
        seed: int,
        sites: list[Site],
        batch_dim: int,
    ) -> None:
        self.model, self.batches, self.loss, self.fisher = model, batches, loss, fisher
        self.dtype, self.seed, self.sites, self.batch_dim = dtype, seed, sites, batch_dim
        self.count, self.warned = 0.0, False
        self.shape: tuple[int | None, int] = None, 0  # examples, if they are known, and terms
        self.device = next(model.parameters()).device.type
        self.counted: Tensor | None = None
        self.waiting: dict[str, list[Event]] = {}

    def over(self, fold: Fold, after: Callable[[], None] = lambda: None) -> float:
        """Give every layer's uses in every pass to `fold`; how many loss terms there were.

        `after`: called at the end of a batch, which may have had many passes back.
        """
        generator = torch.Generator().manual_seed(self.seed)
        terms, seen, mixed = 0.0, set[str](), set[str]()

        def sink(event: Event) -> None:
            name = event.site.name
            seen.add(name)
            if self._mixes(*event.grads.shape[1:3]):
                mixed.add(name)
            events = self.waiting.setdefault(name, [])
            events.append(event)
            if len(events) >= watcher.calls[name]:
                self._fold(fold, self.waiting.pop(name))

        watcher = Watcher(self.sites, sink, self.batch_dim)
        with _frozen(self.model), torch.enable_grad():
            for batch in self.batches:
                watcher.calls.clear()
                with watcher:
                    for total, again in self._losses(batch, generator):
                        if not self.count:  # nothing to go back from, and maybe no example at all
                            break
                        _backward(total, again)
                        # fewer gradients than uses: some were computed twice, or led nowhere
                        for events in self.waiting.values():
                            self._fold(fold, events)
                        self.waiting.clear()
                with self.plain():
                    after()
                terms += self.count
        if mixed and not self.warned:
            self.warned = True
            warnings.warn(
                f"{', '.join(sorted(mixed))} had fewer inputs than the batch has examples, as for "
                "positions that all examples share: its gradients come summed over examples, and "
                "its curvature is wrong; give it an input for each, or leave it out of `layers`",
                stacklevel=3,
            )
        if terms == 0:
            raise ValueError("batches must hold at least one loss term that counts, got none")
        missing = [site.name for site in self.sites if site.name not in seen]
        if missing:
            raise ValueError(
                f"no gradient ever came to {', '.join(missing)}; name in `layers` only layers that "
                "the loss uses"
            )
        return terms

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Statistics are no part of what the user has put under autocast."""
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            yield

    def _fold(self, fold: Fold, events: list[Event]) -> None:
        with self.plain():
            fold(events[0].site, joined(events, self.dtype, self.counted))

    def _losses(self, batch: Any, generator: torch.Generator) -> Iterator[tuple[Tensor, bool]]:
        """What to go back from, and whether it is not the last of its graph."""
        loss = self.loss
        if not isinstance(loss, Likelihood):
            terms, weights = _terms(loss(self.model, batch))
            self._count(weights)
            yield (terms * weights.sqrt()).sum(), False
            return
        outputs, targets = loss.forward(self.model, batch)
        weights = loss.weights(targets)
        self._count(weights)
        fixed = outputs.detach()
        if self.fisher == "exact":
            for part in _places(weights, self.batch_dim):
                for root in loss.roots(fixed):
                    yield (outputs * root * part.sqrt().to(root.dtype).unsqueeze(-1)).sum(), True
            return
        if self.fisher == "sampled":
            uniform = torch.rand(loss.drawn(fixed), generator=generator, dtype=torch.float64)
            targets = loss.draw(fixed, uniform.to(fixed.device))
        terms, weights = _terms((loss.terms(outputs, targets), weights))
        yield (terms * weights.sqrt()).sum(), False

    def _mixes(self, examples: int, places: int) -> bool:
        """Whether a layer that saw this many shares an input among examples of the batch."""
        those, terms = self.shape
        if those is None or examples == those:
            return False
        return examples < those or examples * places < terms

    def _count(self, weights: Tensor) -> None:
        """Remember how many terms count, and which: examples first."""
        self.count = float(weights.sum())
        # of one dimension, terms may be those of all positions of all examples
        examples = weights.size(self.batch_dim) if weights.ndim > 1 else None
        self.shape = examples, weights.numel()
        counted = weights > 0
        if bool(counted.all()):
            self.counted = None
        else:
            self.counted = counted.movedim(self.batch_dim, 0) if counted.ndim > 1 else counted


def _places(weights: Tensor, batch_dim: int) -> Iterator[Tensor]:
    """Weights of one term an example at a time: labels of others are independent of its own."""
    if weights.ndim == 1:
        yield weights
        return
    first = weights.movedim(batch_dim, 0)
    flat = first.reshape(len(first), -1)
    for place in range(flat.size(1)):
        if bool(flat[:, place].any()):
            part = torch.zeros_like(flat)
            part[:, place] = flat[:, place]
            yield part.view(first.shape).movedim(0, batch_dim)


def _terms(result: Any) -> tuple[Tensor, Tensor]:
    """Losses and weights, of what a user's loss has returned."""
    if isinstance(result, tuple) and len(result) != 2:
        raise ValueError(f"loss must return terms, or terms and weights, got {len(result)} things")
    terms, weights = result if isinstance(result, tuple) else (result, None)
    if not isinstance(terms, Tensor) or terms.ndim == 0:
        raise ValueError(
            "loss must return one loss a term, a tensor of at least one dimension, got "
            f"{'a scalar' if isinstance(terms, Tensor) else type(terms).__name__}; use "
            "reduction='none', so that the number of terms is known"
        )
    if weights is None:
        return terms, torch.ones_like(terms, requires_grad=False)
    if weights.shape != terms.shape:
        raise ValueError(
            f"loss must return weights in the shape of its terms {tuple(terms.shape)}, got "
            f"{tuple(weights.shape)}"
        )
    if not bool((weights >= 0).all()):
        raise ValueError(f"weights of loss terms must be at least 0, got {float(weights.min())}")
    return terms, weights.to(terms.dtype)


def _backward(total: Tensor, again: bool = False) -> None:
    if not total.requires_grad:
        raise ValueError(
            "the loss does not depend on any of the layers observed; name in `layers` those that "
            "it uses"
        )
    total.backward(retain_graph=again)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradient of a parameter is computed: outputs of layers are all that is asked for."""
    learned = [param for param in model.parameters() if param.requires_grad]
    for param in learned:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in learned:
            param.requires_grad_(True)


def _finished(site: Site, sums: Sums, method: str, terms: float) -> dict[str, Tensor]:
    """Sums made means: by the positions for inputs of K-FAC, by the terms for all others."""
    found = mirrored(sums)
    places = found.pop("places", None)
    for name, value in found.items():
        by = float(places) if name == "input" and places is not None else terms
        found[name] = value / by
    _check_finite(site.name, found)
    return found


def _check_finite(layer: str, found: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if not bool(value.isfinite().all()):
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
