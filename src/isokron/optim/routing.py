"""Who steps which parameter: settings by what it is, overrides by name pattern."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from isokron.cutting import is_matrix
from isokron.optim.kinds import find_kinds, find_owners, in_layer, matrices_within

SETTINGS: dict[str, dict[str, Any]] = {
    "matrices": {"route": "method"},
    "adapters": {"route": "adamw"},
    "embeddings": {"route": "adamw"},
    "heads": {"route": "adamw"},
    "filters": {"route": "adamw"},
    "norms": {"route": "adamw", "weight_decay": 0.0},
    "vectors": {"route": "adamw", "weight_decay": 0.0},
}
Parts = int | Sequence[int]


def param_groups(
    model: nn.Module,
    *,
    adamw: Sequence[str] = (),
    method: Sequence[str] = (),
    stacked: Sequence[str] | Mapping[str, int] = (),
    split: Mapping[str, Parts] | None = None,
    lr_scale: Mapping[str, float] | None = None,
    weight_decay: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for any isokron optimizer, found by module type. Frozen ones are left out.

    Embeddings (also one tied to a head), the output head, LoRA pairs, depthwise filters, norms and
    biases go to AdamW, the last two without weight decay; every other matrix gets the method. The
    input projection of nn.MultiheadAttention counts as three
    matrices, the weights of nn.LSTM and nn.GRU as one a gate, a grouped convolution as one a group.

    The rest are overrides by name pattern ("blocks.*.wq.weight"), the first match winning:
    `adamw`, `method`: who steps it. `stacked`: weights [experts, m, n] that count as that many
    matrices (a mapping gives the number of leading dimensions). `split`: fused projections, as
    a number of equal parts or their sizes. `lr_scale`: factors on the schedule. `weight_decay`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes the model, not {type(model).__name__}: it looks at the modules "
            "that parameters belong to; write isokron.param_groups(model)"
        )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, param in named.items():
        if isinstance(param, UninitializedParameter):
            raise ValueError(
                f"param_groups: {name!r} has no shape yet; run one forward pass through the model "
                "before asking what its parameters are"
            )
    if not named:
        raise ValueError("param_groups: the model has no parameter that requires a gradient")
    owners = find_owners(model)
    kinds = find_kinds(model, owners)
    stacking = stacked if isinstance(stacked, Mapping) else dict.fromkeys(_listed(stacked), 1)
    to_adamw = _matches(_listed(adamw), named, "adamw")
    to_method = _matches(_listed(method), named, "method")
    overrides = {
        "stacked": _lookup(stacking, named, "stacked"),
        "split": _lookup(split or {}, named, "split"),
        "lr_scale": _lookup(lr_scale or {}, named, "lr_scale"),
        "weight_decay": _lookup(weight_decay or {}, named, "weight_decay"),
    }
    both = sorted(to_adamw & to_method)
    if both:
        raise ValueError(f"param_groups: {both[0]!r} matches both adamw and method; keep one")

    raw: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, param in named.items():
        kind = kinds[param]
        settings = {**SETTINGS[kind], **matrices_within(param, owners[param])}
        if name in to_method:
            if not is_matrix(param.shape):
                raise ValueError(
                    f"param_groups: method matches {name!r} of shape {tuple(param.shape)}, "
                    "which is not a matrix; only matrices can get the method"
                )
            settings["route"] = "method"
        elif name in to_adamw:
            settings["route"] = "adamw"
        settings |= {key: found[name] for key, found in overrides.items() if name in found}
        told = name in to_method or "stacked" in settings or "split" in settings
        clear = told or kind != "matrices" or in_layer(owners[param])
        if settings["route"] == "method" and not clear:
            raw[name] = param
        if settings["route"] == "adamw":  # AdamW works element by element
            for key in ("stacked", "split", "split_dim"):
                settings.pop(key, None)
        group = groups.setdefault(repr((kind, settings)), {"name": kind, **settings, "params": []})
        group["params"].append((name, param))
    if raw:
        _warn_of_raw(raw)
    return list(groups.values())


def _warn_of_raw(names: Mapping[str, Tensor]) -> None:
    """Weights that are in no layer of a known type: only their author knows what they are."""
    shown = ", ".join(f"{name} {tuple(param.shape)}" for name, param in list(names.items())[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    warnings.warn(
        f"param_groups: taken as matrices, though in no layer of a known type: {shown}{more}. Name "
        "them, by pattern, in adamw= if they are tables (such as positions), in stacked= if they "
        "are stacks of matrices (such as experts), in method= if they are matrices",
        stacklevel=3,
    )


def _listed(patterns: Sequence[str] | str) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _matches(patterns: Iterable[str], named: Mapping[str, Tensor], argument: str) -> set[str]:
    return set(_lookup(dict.fromkeys(patterns, True), named, argument))


def _lookup(
    patterns: Mapping[str, Any], named: Mapping[str, Tensor], argument: str
) -> dict[str, Any]:
    """Per name, the value of the first pattern that matches; each pattern must match one."""
    found: dict[str, Any] = {}
    for pattern, value in patterns.items():
        hits = [name for name in named if fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(
                f"param_groups: {argument} pattern {pattern!r} matches no trainable parameter; "
                f"names look like {', '.join(list(named)[:3])}"
            )
        for name in hits:
            found.setdefault(name, value)
    return found
