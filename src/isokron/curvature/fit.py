"""Fit curvature: passes over data become statistics, one set a layer, on one process or several."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature import statistics
from isokron.curvature.backward import Passes, check_reached
from isokron.curvature.curvature import Curvature, LayerCurvature
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood, Loss
from isokron.curvature.positions import Masks
from isokron.curvature.selection import Selection, find_layers
from isokron.curvature.statistics import GradientRows, Sums, Uses, check_finite, means_of
from isokron.digest import weights_digest
from isokron.distributed.process_group import Ranks
from isokron.distributed.rank_tasks import gather, share, together
from isokron.linalg import eigh, halved, unhalve_
from isokron.names import answered
from isokron.operators import LowRank
from isokron.operators.kron import is_thin
from isokron.operators.low_rank import LARGE

METHODS = ("kfac", "ekfac", "tkfac", "shampoo")
FISHERS = ("empirical", "sampled", "exact")
SHARINGS = ("expand", "reduce")
TERMS = "terms of the loss"  # no layer's name, under which these are summed
MAX_TERMS = 8192  # of which gradients are kept in place of an output side
WORKSPACE = 8  # copies of the largest matrix in a Cholesky inverse or an eigendecomposition


@answered
def fit(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | Likelihood,
    method: str = "kfac",
    *,
    fisher: str = "empirical",
    sharing: str = "expand",
    layers: Iterable[str] | str | None = None,
    selection: Selection | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    policy: str | Mapping[str, str] = "dense",
    rho: float = 0.75,
    t_max: int = MAX_TERMS,
    o_max: int = LARGE,
    store: str = "auto",
    store_dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
) -> Curvature:
    """The Fisher of a model's layers, F ≈ Σ ∇∇ᵀ / M over examples, M the terms of the loss.

    Args:
        batches: any iterable; EK-FAC goes over it twice, and `ranks` need its length and slices.
        loss: `loss(model, batch)` returns one loss an example, [N], or by example [N, ...], or
            (losses, weights).
        method: "kfac", "ekfac", "tkfac" or "shampoo".
        fisher: gradients of the data's labels ("empirical"), of labels drawn from the model
            ("sampled", by `seed` and the number of the batch, anew for EK-FAC's eigenvalues), or of
            all labels ("exact"). The last two need a likelihood.
        sharing: positions that share a weight count one by one ("expand") or are taken together
            ("reduce") in the factors of K-FAC and TKFAC.
        layers: patterns of names.
        selection: layers chosen before, in place of `layers`.
        dtype: of the statistics.
        policy: an output side of o outputs is a covariance o×o ("dense") or the T gradients it is
            made of, inverted by Woodbury: always ("all"), for o > o_max ("hybrid"), or while
            T ≤ rho·o and T ≤ t_max ("auto"). More than `t_max` are refused. A mapping says it by
            layer. EK-FAC has eigenvalues in the span of the gradients and one per input outside of
            it; a closed-form head (fisher="exact") whose probabilities are kept is K-FAC.
        store: where gradients are kept: on the model's "device", the "host", or on the device up to
            500 MB ("auto"); in `store_dtype`, by default `dtype`.
        ranks: processes that share the batches. Sums are added up in float64: the result is that of
            one process to the rounding of `dtype`, and to the bit for the same number of ranks.
    """
    choices = {"method": (method, METHODS), "fisher": (fisher, FISHERS)}
    for argument, (value, allowed) in {**choices, "sharing": (sharing, SHARINGS)}.items():
        if value not in allowed:
            raise ValueError(f"{argument} must be one of {allowed}, got {value!r}")
    _check_data(batches, loss, method, fisher, ranks)
    if selection is None:
        selection = find_layers(model, layers, head="skip" if policy == "dense" else "lowrank")
    chosen = selection.layers
    policies = policy_by_layer(policy, [layer.name for layer in chosen])
    methods = dict.fromkeys(policies, method)
    sums = {
        name: Sums()
        if rule == "dense"
        else GradientRows(name, rule, rho, t_max, store, store_dtype, o_max)
        for name, rule in policies.items()
    }
    # labels are drawn by the number of the batch: one process and several draw the same
    first = 0
    if ranks is not None:
        numbers = share(ranks, len(batches))  # type: ignore[arg-type]
        first, batches = numbers.start, batches[numbers.start : numbers.stop]  # type: ignore[index]
    passes = Passes(
        model, batches, loss, chosen, fisher=fisher, dtype=dtype, seed=seed, first=first
    )
    fold = Fold(methods, fisher, sharing, sums)
    with together(ranks, "a pass over the data"):
        passes.over(fold.take, lambda: fold.end_batch(passes.count), check=False)
    like = torch.zeros((), dtype=dtype, device=next(model.parameters()).device)
    # a layer without gradients is known only when all ranks have told theirs
    _reduce_(fold.sums, ranks, like)
    terms = float(fold.sums[TERMS][TERMS])
    idle = [layer for layer in chosen if fold.sums[layer.name].empty()]
    check_reached(terms, idle)
    with passes.plain():
        for layer in idle:
            fold.take(layer, _without_tokens(layer, like))
        fold.end_batch(0.0)
    means = {layer.name: means_of(fold.sums[layer.name], terms, like) for layer in chosen}
    for name, tensors in means.items():
        check_finite(name, tensors)
    if method == "ekfac":
        # diag(p̄) − UUᵀ of a softmax has no thin eigenbasis
        methods |= {name: "kfac" for name, tensors in means.items() if "mean" in tensors}
        sides = "output", "columns"
        corrected = [
            layer
            for layer in chosen
            if methods[layer.name] == "ekfac" and any(side in means[layer.name] for side in sides)
        ]
        _decompose_(means, corrected, ranks, like.device)
        _correct_(means, corrected, passes, terms, ranks, like)

    def fitted(layer: Layer) -> LayerCurvature:
        name = layer.name
        return LayerCurvature(name, methods[name], layer.layout, means[name], policies[name], terms)

    fingerprint = {"weights": weights_digest(model)}
    curvature = Curvature([fitted(layer) for layer in chosen], fingerprint=fingerprint)
    curvature.log()
    return curvature


class Fold:
    """The sums of a first pass over the data, by layer."""

    def __init__(
        self, methods: Mapping[str, str], fisher: str, sharing: str, sums: Mapping[str, Sums]
    ) -> None:
        self.methods, self.fisher, self.sharing = dict(methods), fisher, sharing
        self.waiting: dict[tuple[Any, ...], tuple[Layer, Uses]] = {}  # by layer and source
        self.masks = Masks()
        self.sums = {TERMS: Sums({TERMS: torch.zeros((), dtype=torch.float64)}), **sums}

    def take(self, layer: Layer, uses: Uses) -> None:
        """The uses of one layer in one backward pass, or in place of all of them, of a softmax."""
        sums, method = self.sums[layer.name], self.methods[layer.name]
        shared = self._shared(uses)
        self.masks.add(uses)
        if uses.kind == "softmax" and method in ("tkfac", "shampoo"):
            statistics.softmax_traced_(sums, uses, self.sharing if method == "tkfac" else "expand")
        elif uses.kind == "softmax":
            statistics.output_covariance_(sums, uses)
            self._wait(layer, uses)
        elif uses.kind == "diagonal":
            statistics.diagonal_(sums, uses, list(layer.layout.params))
        elif method == "tkfac":
            if shared is uses or uses.counted is None or self.fisher == "exact":
                statistics.traced_(sums, shared, layer.columns)
            else:  # which positions the mean input is of
                self._wait(layer, uses)
        elif method == "shampoo":
            statistics.gradients_(sums, uses, layer.columns)
        elif self.fisher == "exact" or uses.counted is not None:
            # inputs count once a batch, however many passes go back from it, and where the
            # gradient of this layer or of another with the same input is not zero
            statistics.output_covariance_(sums, shared)
            self._wait(layer, replace(uses, grads=uses.grads.new_empty(*uses.grads.shape[:3], 1)))
        else:
            statistics.covariances_(sums, shared, layer.columns)

    def _wait(self, layer: Layer, uses: Uses) -> None:
        self.waiting[layer.name, uses.source] = layer, uses

    def end_batch(self, terms: float) -> None:
        self.end_inputs()
        self.sums[TERMS][TERMS] += terms

    def end_inputs(self) -> None:
        """Fold the inputs of layers for which it was not known yet which positions count."""
        for layer, uses in self.waiting.values():
            sums, shared = self.sums[layer.name], self._shared(self.masks.on(uses))
            if self.methods[layer.name] == "tkfac":
                statistics.traced_(sums, shared, layer.columns)
            else:
                statistics.input_covariance_(sums, shared, layer.columns)
        self.waiting.clear()
        self.masks.clear()

    def _shared(self, uses: Uses) -> Uses:
        return statistics.reduced(uses) if self.sharing == "reduce" else uses


def _reduce_(layers: Mapping[str, Sums], ranks: Ranks | None, like: Tensor) -> None:
    """Add up the sums of all ranks, of which some may have had no batch that used a layer."""
    if ranks is None:
        return
    _agree_on_rows_(layers, ranks, like)
    local = {n: {key: list(value.shape) for key, value in s.items()} for n, s in layers.items()}
    shapes: dict[str, dict[str, list[int]]] = {name: {} for name in layers}
    for text in ranks.gather_text(json.dumps(local)):
        for name, of_layer in json.loads(text).items():
            shapes[name].update(of_layer)
    for name, of_layer in shapes.items():
        for key, shape in of_layer.items():
            zeros = like.new_zeros(shape) if shape else torch.zeros((), dtype=torch.float64)
            layers[name].setdefault(key, zeros)
        add_ranks_(layers[name], ranks, like, name)


def _agree_on_rows_(layers: Mapping[str, Sums], ranks: Ranks, like: Tensor) -> None:
    """policy="auto" by the gradients of all ranks: sum them up if one process would have."""
    rows = {name: sums for name, sums in layers.items() if isinstance(sums, GradientRows)}
    local = {
        name: {
            key: [
                sum(part.size(1) for part in parts),
                parts[0].size(2) if parts else 0,
                key in sums,
            ]
            for key, parts in sums.rows.items()
        }
        for name, sums in rows.items()
    }
    everyone = [json.loads(text) for text in ranks.gather_text(json.dumps(local))]
    for name, sums in rows.items():
        for key in sums.rows:
            counts, outputs, summed = zip(
                *(of_rank[name][key] for of_rank in everyone), strict=True
            )
            if any(summed) or not sums.keeps(max(1, *outputs), sum(counts)):
                sums.fold(key, like)


def add_ranks_(sums: Sums, ranks: Ranks, like: Tensor, layer: str) -> None:
    """Σ over ranks of every sum, in float64 and one collective; all ranks have the same keys.

    Rows that are kept are joined by rank: ranks have neighbouring batches, so that they come in the
    order of one process. Gram matrices of ranks do not add up: they lack the products of one rank's
    rows with another's.
    """
    if isinstance(sums, GradientRows):
        # later rows may have moved to the host
        local = {
            key: torch.cat([part.to(parts[-1].device) for part in parts], 1)
            for key, parts in sums.rows.items()
            if parts
        }
        sums.rows = {key: [] for key in sums.rows}
        for rows in gather(ranks, local):
            for key, part in rows.items():
                sums.gram(key, part.to(like.device))
    if not sums:
        return
    keys = sorted(sums)
    square = {key for key in keys if key in statistics.SQUARE and sums[key].ndim == 3}
    parts = [halved(sums[key]) if key in square else sums[key] for key in keys]
    device = ranks.near(like.device)
    flat = torch.cat([part.reshape(-1).to(device, torch.float64) for part in parts])
    ranks.all_reduce_(flat, what=f"the sums of layer {layer!r}")
    for key, part, total in zip(keys, parts, flat.split([p.numel() for p in parts]), strict=True):
        total = total.view(part.shape).to(part)
        if key in square:
            unhalve_(sums[key], total)
        else:
            sums[key] = total


def _decompose_(
    means: Mapping[str, dict[str, Tensor]],
    layers: Sequence[Layer],
    ranks: Ranks | None,
    device: torch.device,
) -> None:
    """EK-FAC: eigenbases in place of both sides. Every rank has one layer at a time."""
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    # ranks wait for each other: layers of about the same cost are decomposed together
    names = [x.name for x in sorted(layers, key=lambda x: x.shape[1] ** 3 + x.shape[2] ** 3)]
    for start in range(0, len(names), size):
        group = names[start : start + size]
        bases: dict[str, Tensor] = {}
        with together(ranks, "the eigenbases of layers"):
            tensors = means[group[rank]] if rank < len(group) else {}
            columns = tensors.pop("columns", None)
            if columns is not None and columns.size(2) < columns.size(1):
                zeros = tensors["input"].new_zeros(len(columns), 1)
                bases["basis.output"] = LowRank(zeros, columns).eigen()[1]
            elif columns is not None:  # o×o is not larger, and has all eigenvectors
                wide = columns.to(tensors["input"])
                tensors["output"] = wide @ wide.mT
            for side in [side for side in ("output", "input") if side in tensors]:
                # a side is freed before the next is decomposed
                matrix = tensors.pop(side)
                # columns of an embedding have no basis; contiguous as after `gather`, since
                # products with another layout of memory round otherwise
                if matrix.ndim == 3:
                    bases[f"basis.{side}"] = eigh(matrix)[1].contiguous()
        everyone = [bases] if ranks is None else gather(ranks, bases)
        for name, tensors in zip(group, everyone, strict=False):
            means[name].clear()
            # a thin basis stays where its columns were
            means[name].update({k: x if is_thin(x) else x.to(device) for k, x in tensors.items()})


def _correct_(
    means: Mapping[str, dict[str, Tensor]],
    layers: Sequence[Layer],
    passes: Passes,
    terms: float,
    ranks: Ranks | None,
    like: Tensor,
) -> None:
    """EK-FAC: Λ in these bases, by a second pass over the data."""
    sums = {layer.name: Sums() for layer in layers}

    def take(layer: Layer, uses: Uses) -> None:
        if layer.name not in sums:
            return
        left, right = means[layer.name]["basis.output"], means[layer.name].get("basis.input")
        if uses.kind == "softmax" and right is not None:
            statistics.softmax_eigenvalues_(sums[layer.name], uses, left, right)
        else:
            statistics.eigenvalues_(sums[layer.name], uses, (left, right), layer.columns)

    with together(ranks, "a second pass over the data"):
        passes.over(take, check=False)
    _reduce_(sums, ranks, like)
    for layer in layers:
        if sums[layer.name].empty():
            with passes.plain():
                take(layer, _without_tokens(layer, like))
        means[layer.name].update(means_of(sums[layer.name], terms, like))
        check_finite(layer.name, means[layer.name])


def _without_tokens(layer: Layer, like: Tensor) -> Uses:
    """The uses of an expert that no token was sent to: one gradient, of zeros."""
    _, outputs, inputs = layer.shape
    bias = layer.layout.bias
    x, grads = like.new_zeros(1, 1, 1, inputs - bias), like.new_zeros(1, 1, 1, outputs)
    return Uses(x, grads, layer.kind, bias=bias)


def planned_bytes(
    layers: Iterable[Layer],
    method: str,
    dtype: torch.dtype = torch.float32,
    *,
    lowrank: Collection[str] = (),
    terms: int = MAX_TERMS,
) -> dict[str, int]:
    """Bytes of statistics, of the decompositions of `damped_inverse`, and of both at their peak.

    `lowrank`: names of layers that keep `terms` gradients in place of their output side.
    """
    sides = values = scaled = largest = 0
    for layer in layers:
        (blocks, outputs, inputs), kind = layer.shape, layer.kind
        low = layer.name in lowrank
        if kind == "diagonal" or method == "ekfac":
            values += blocks * (min(terms, outputs) if low else outputs) * inputs
        if kind == "diagonal":
            continue
        output = blocks * outputs * (terms if low else outputs)
        square = blocks * (inputs**2 if kind == "dense" else inputs)
        sides += output + square
        # operators of TKFAC and Shampoo have a copy of the input side, over its trace
        scaled += square if method in ("tkfac", "shampoo") else 0
        # Woodbury's T×T is in float64
        largest = max(largest, output, square, 2 * terms**2 if low else 0)
    size = dtype.itemsize
    held = (sides + values) * size
    # the inverse of EK-FAC shares its bases
    inverses = (values if method == "ekfac" else sides + values) * size
    peak = held + inverses + (scaled + WORKSPACE * largest) * size
    return {"statistics": held, "decompositions": inverses, "peak": peak}


def policy_by_layer(policy: str | Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The policy of every layer."""
    by_name = policy if isinstance(policy, Mapping) else dict.fromkeys(names, policy)
    unknown = sorted(set(by_name) - set(names))
    if unknown:
        raise ValueError(
            f"policy must name layers that are fitted, got {unknown[0]!r}; these are "
            f"{', '.join(names[:6])}, …"
        )
    return {name: by_name.get(name, "dense") for name in names}


def _check_data(batches: Any, loss: Any, method: str, fisher: str, ranks: Ranks | None) -> None:
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
    if ranks is not None and not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
        raise ValueError(
            "batches must have a length and slices to be shared by ranks, such as a list has, got "
            f"{type(batches).__name__}"
        )
