"""Who steps which parameter: settings by what it is, overrides by name pattern."""

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from isokron.block_layout import is_matrix
from isokron.optim.kinds import find_kinds, find_owners, find_parts, head_weights
from isokron.optim.settings import SHARED
from isokron.optim.tables import is_table

SETTINGS: dict[str, dict[str, Any]] = {
    "matrices": {"route": "method"},
    "raw weights": {"route": "method"},
    "embeddings": {"route": "adamw"},
    "heads": {"route": "adamw"},
    "adapters": {"route": "adamw"},
    "filters": {"route": "adamw"},
    "rows": {"route": "adamw"},
    "norms": {"route": "adamw", "weight_decay": 0.0},
    "vectors": {"route": "adamw", "weight_decay": 0.0},
}
Parts = int | Sequence[int]
Patterns = Sequence[str] | str


def param_groups(
    model: nn.Module,
    *,
    adamw: Patterns = (),
    method: Patterns = (),
    head: nn.Module | Patterns | None = None,
    stacked: Patterns | Mapping[str, int] = (),
    split: Mapping[str, Parts] | None = None,
    lr_scale: Mapping[str, float] | None = None,
    weight_decay: Mapping[str, float] | float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for any isokron optimizer, found by module type. Frozen ones are left out.

    Embeddings (also one tied to a head), the output head, LoRA pairs, depthwise filters, norms and
    biases go to AdamW, the last two without weight decay; every other matrix gets the method. Of
    fused projections, gates, grouped convolutions and experts of known modules each part counts as
    a matrix. `print(isokron.describe(groups))` shows the result; see docs/routing.md.

    Patterns are matched against full names ("blocks.*.wq.weight"); the first match wins.

    Args:
        model: The model; its modules say what its parameters are.
        adamw: Patterns of parameters that AdamW steps.
        method: Patterns of matrices that get the method.
        head: The output layer, as a module or by patterns, where it would not be found.
        stacked: Patterns of weights [experts, m, n] that count as that many matrices, or a mapping
            to the number of leading dimensions.
        split: Patterns of fused projections, with a number of equal parts or their sizes.
        lr_scale: Patterns, with factors on the learning rate.
        weight_decay: Patterns, with weight decays; or the decay of every group that decays.
    """
    named = _trainable(model)
    owners = find_owners(model)
    kinds = find_kinds(model, owners, _given_heads(model, named, head))
    parts = find_parts(model)
    usual, decays = _decay(weight_decay)
    told = {
        "route": _routes(adamw, method, named),
        "stacked": _lookup(stacked, named, "stacked", 1),
        "split": _lookup(split or {}, named, "split"),
        "lr_scale": _lookup(lr_scale or {}, named, "lr_scale"),
        "weight_decay": _lookup(decays, named, "weight_decay"),
    }
    groups: dict[str, dict[str, Any]] = {}
    asked: dict[str, str] = {}
    for name, param in named.items():
        kind = kinds[param]
        own = {key: values[name] for key, values in told.items() if name in values}
        settings = {**usual, **SETTINGS[kind], **parts.get(param, {}), **own}
        if kind == "raw weights" and not own.keys() & {"route", "stacked", "split"}:
            table = param.ndim > 2 or is_table(param.shape, SHARED)
            settings["route"] = asked[name] = "adamw" if table else "method"
        title = group_name(kind, settings := _effective(settings), usual)
        groups.setdefault(title, {"name": title, **settings, "params": []})
        groups[title]["params"].append((name, param))
    if asked:
        _warn_of_raw(named, asked)
    return list(groups.values())


def group_name(kind: str, settings: Mapping[str, Any], usual: Mapping[str, float]) -> str:
    """What a group holds and how it is stepped; groups of one name have the same settings."""
    details = ["adamw"] if settings["route"] == "adamw" else []
    if depth := settings.get("stacked"):
        details.append("stacked" if depth == 1 else f"stacked {depth} deep")
    if (split := settings.get("split")) is not None:
        count = str(split) if isinstance(split, int) else "+".join(map(str, split))
        details.append(f"split in {count}" + (" by columns" if settings.get("split_dim") else ""))
    if "lr_scale" in settings:
        details.append(f"lr × {settings['lr_scale']}")
    decay = settings.get("weight_decay")
    if decay != usual.get("weight_decay"):
        details.append(f"decay {decay}" if decay else "no decay")
    return f"{kind} ({', '.join(details)})" if details else kind


def _effective(settings: dict[str, Any]) -> dict[str, Any]:
    """Without what nothing would read: AdamW works element by element."""
    unread = {"split_dim"} if settings.get("split") is None else set()
    if settings["route"] == "adamw":
        unread = {"stacked", "split", "split_dim"}
    return {key: value for key, value in settings.items() if key not in unread}


def _trainable(model: nn.Module) -> dict[str, Tensor]:
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
    return dict(named)


def _given_heads(
    model: nn.Module, named: Mapping[str, Tensor], head: nn.Module | Patterns | None
) -> set[Tensor] | None:
    if head is None:
        return None
    if not isinstance(head, nn.Module):
        names = _lookup(head, named, "head")
        return {named[name] for name in names if named[name].ndim > 1}
    if not any(module is head for module in model.modules()):
        raise ValueError(
            f"param_groups: head must be a module of the model, got another {type(head).__name__}; "
            'pass model.head itself, or a pattern such as "head.*"'
        )
    return head_weights(head)


def _decay(weight_decay: Any) -> tuple[dict[str, float], Mapping[str, float]]:
    """The decay of all groups that decay, and those of patterns."""
    if weight_decay is None or isinstance(weight_decay, Mapping):
        return {}, weight_decay or {}
    if isinstance(weight_decay, Real):
        return {"weight_decay": float(weight_decay)}, {}
    raise TypeError(
        "param_groups: weight_decay must be a number or a mapping of patterns to numbers, got "
        f"{weight_decay!r}"
    )


def _routes(adamw: Patterns, method: Patterns, named: Mapping[str, Tensor]) -> dict[str, str]:
    routes = dict.fromkeys(_lookup(adamw, named, "adamw"), "adamw")
    for name in _lookup(method, named, "method"):
        if name in routes:
            raise ValueError(f"param_groups: {name!r} matches both adamw and method; keep one")
        if not is_matrix(named[name].shape):
            raise ValueError(
                f"param_groups: method matches {name!r} of shape {tuple(named[name].shape)}, "
                "which is not a matrix; only matrices can get the method"
            )
        routes[name] = "method"
    return routes


def _warn_of_raw(named: Mapping[str, Tensor], routes: Mapping[str, str]) -> None:
    """Weights that are in no layer of a known type: only their author knows what they are."""
    texts = []
    for route, fate in (("method", "taken as matrices"), ("adamw", "left to AdamW")):
        names = [name for name, taken in routes.items() if taken == route]
        shown = ", ".join(f"{name} {tuple(named[name].shape)}" for name in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        texts += [f"{fate}: {shown}{more}"] if names else []
    warnings.warn(
        f"param_groups: in no layer of a known type, {'; '.join(texts)}. Name them, by pattern, in "
        "adamw= if they are tables (such as positions), in stacked= if they are stacks of matrices "
        "(such as experts), in method= if they are matrices",
        stacklevel=3,
    )


def _lookup(
    patterns: Mapping[str, Any] | Patterns,
    named: Mapping[str, Tensor],
    argument: str,
    default: Any = True,
) -> dict[str, Any]:
    """Per name, the value of the first pattern that matches; each pattern must match one."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    values = listed if isinstance(listed, Mapping) else dict.fromkeys(listed, default)
    found: dict[str, Any] = {}
    for pattern, value in values.items():
        hits = [name for name in named if fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(
                f"param_groups: {argument} pattern {pattern!r} matches no trainable parameter; "
                f"names look like {', '.join(list(named)[:3])}"
            )
        for name in hits:
            found.setdefault(name, value)
    return found
