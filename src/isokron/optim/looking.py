"""What all passes since the last step have shown, here or on all ranks, and whether to step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.linalg import on_host
from isokron.optim.checks import check_kinds, check_sums, gradient_sums
from isokron.optim.groups import param_name
from isokron.optim.layers import Layers
from isokron.optim.observing import check_seen, factor, layer_sums, means
from isokron.optim.pooling import Counts, Pooling
from isokron.optim.rows import Rows

Groups = Sequence[Mapping[str, Any]]
Seen = dict[str, dict[str, Tensor]]
NAME = "NaturalGradient"


def look(layers: Layers, groups: Groups, scale: float) -> tuple[Seen | None, str | None]:
    """All passes as one batch, layer by layer; and why to leave the step out, if there is a reason.

    None where there is no gradient at all. `scale`: of the loss. See `means` and `factor`.
    """
    idle = all(param.grad is None for group in groups for param in group["params"])
    if layers.pooling is not None:
        return _together(layers, layers.pooling, groups, scale, idle)
    if idle:
        return None, None
    taken, terms = layers.recorder.take()
    seen = {}
    for name, sums in taken.items():
        places, count = sums.pop("places", None), terms[name]
        square = (factor(groups[0]["reduction"], count, count) / scale) ** 2
        seen[name] = means(sums, count, None if places is None else float(places), square / count)
    return seen, _check(layers, groups, seen)


def asks_for_state(layers: Layers, groups: Groups) -> bool:
    """Whether this is no step, but torch.distributed.checkpoint that has an optimizer make its
    state: by a step before all others, after no pass, with lr and all gradients 0."""
    if groups[0]["steps"] or layers.recorder.seen() or any(float(g["lr"]) for g in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    dense = bool(grads) and all(grad.layout is torch.strided for grad in grads)
    return dense and not any(bool(grad.any()) for grad in grads)


def _check(layers: Layers, groups: Groups, seen: Mapping[str, Mapping[str, Tensor]]) -> str | None:
    """Raise, or say why to skip the step, for gradients and what layers have shown; None: step.

    It reads what the last refresh has done too: the one time that a step waits for a device.
    """
    check_kinds(NAME, groups)
    sums = gradient_sums(groups, False)
    shown = layer_sums(seen) if groups[0]["nonfinite"] != "ignore" else []
    values = on_host([*sums, *shown, *layers.unread.values()])
    end = len(sums) + len(shown)
    layers.note([bool(failed) for (failed,) in values[end:]])
    unfit = check_sums(NAME, groups, False, values[: len(sums)])
    if unfit is not None or not shown:
        return unfit
    return check_seen(seen, values[len(sums) : end], groups[0]["nonfinite"])


def _together(
    layers: Layers, pooling: Pooling, groups: Groups, scale: float, idle: bool
) -> tuple[Seen | None, str | None]:
    """`look` of all ranks, each of which has passes of its own."""
    group = groups[0]
    taken, terms = ({}, {}) if idle else layers.recorder.take()
    wrong: Exception | str | None
    try:
        seen = {name: _parts(sums) for name, sums in taken.items()}
        wrong = _check(layers, groups, seen)
    except Exception as error:  # the others are to hear of it before it ends this rank
        wrong = error
    places = {name: int(sums.get("places", terms[name])) for name, sums in taken.items()}
    own: Counts = [(terms.get(site.name, 0), places.get(site.name, 0)) for site in layers.sites]
    facts = _facts(layers, pooling, groups, taken)
    everyone, unfit = pooling.meet(facts, own, _length(groups), wrong)
    if idle or unfit is not None:
        return (None if idle else {}), unfit
    by_name = {site.name: each for site, each in zip(layers.sites, everyone, strict=True)}
    counts = {name: by_name[name] for name in taken}
    totals = {name: [sum(of) for of in zip(*each, strict=True)] for name, each in counts.items()}
    factors = {
        name: factor(group["reduction"], terms[name], totals[name][0], pooling.ranks.size) / scale
        for name in taken
    }
    correct = group["method"] == "ekfac"
    shared = pooling.share(taken, factors, counts, lambda name: layers.thin(name, correct))
    found = {
        name: means(sums, totals[name][0], totals[name][1], 1 / totals[name][0])
        for name, sums in shared.items()
    }
    # sums over all ranks, so that all come to one decision; columns are looked at above
    dense = {name: {k: v for k, v in of.items() if k != "columns"} for name, of in found.items()}
    return found, check_seen(dense, on_host(layer_sums(dense)), group["nonfinite"])


def _parts(sums: Rows) -> dict[str, Tensor]:
    kept = {side: sums.kept(side) for side, parts in sums.rows.items() if parts}
    return {**sums, **kept}


def _facts(
    layers: Layers, pooling: Pooling, groups: Groups, taken: Mapping[str, Rows]
) -> dict[str, Any]:
    """What ranks that step together have in common, told when they have not."""
    own = [
        (site.name, site.layout.shape, str(next(site.module.parameters()).dtype))
        for site in layers.sites
    ]
    settings = [
        {k: float(v) if isinstance(v, Tensor) else str(v) for k, v in group.items() if _plain(k)}
        for group in groups
    ]
    present = [
        param_name(group, i)
        for group in groups
        for i, param in enumerate(group["params"])
        if param.grad is not None
    ]
    return {
        "layers": own,
        "reduce": pooling.reduce,
        "settings": settings,
        "what layers have shown since the last step": {
            name: sorted(sums.sides() - {"places"}) for name, sums in taken.items()
        },
        "parameters with a gradient": present,
        "state of layers": {name: sorted(state) for name, state in layers.known.items()},
    }


def _plain(key: str) -> bool:
    return key not in ("params", "param_names")


def _length(groups: Groups) -> float:
    """Of all gradients together."""
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    if not grads:
        return 0.0
    wide = [torch.promote_types(grad.dtype, torch.float32) for grad in grads]
    norms = [torch.linalg.vector_norm(g, dtype=d) for g, d in zip(grads, wide, strict=True)]
    # squares of what is large overflow in float32; and one wait for a device, not one a gradient
    together = torch.stack([norm.double().to(norms[0].device) for norm in norms])
    return float(torch.linalg.vector_norm(together))
