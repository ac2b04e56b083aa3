"""Parameter groups of a model, and which parameters the method steps."""

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from isokron.block_layout import is_matrix, split_sizes
from isokron.names import unknown_keyword
from isokron.optim.lr_transfer import (
    METHOD_MULTIPLE,
    REST_MULTIPLE,
    check_multiples,
    read_base_shapes,
)
from isokron.optim.param_kinds import find_kinds, find_parts, layer_weights
from isokron.optim.settings import GROUP_KEYS, RULES, SHARED, param_name, require
from isokron.optim.wrapped_models import named_parameters, unwrapped

if TYPE_CHECKING:
    from isokron.optim.preconditioned import Preconditioned

# The kinds of parameters, and the settings of their groups besides those that all groups get.
KINDS: dict[str, dict[str, Any]] = {
    "matrices": {},
    "raw weights": {},  # of an nn.Parameter that is in no layer of a known type
    **{kind: {"route": "adamw"} for kind in ("embeddings", "heads", "adapters", "filters", "rows")},
    **{kind: {"route": "adamw", "weight_decay": 0.0} for kind in ("norms", "vectors")},
}
TALL = 4  # rows per column above which a matrix is a table: MLPs have 4, vocabularies more
WIDE = 64  # columns per row above which it is one: convolutions have 49, stacks of experts more
UNSCALED = ("embeddings", "norms", "vectors")  # one learning rate suits all widths
# what a group's name says by its kind or in other words
SAID = ("route", "stacked", "split", "split_dim", "fans", "match_adamw")
SEVERAL = 6  # from so many matrices on, a tall first or last one is taken for a table

Patterns = Sequence[str] | str


def param_groups(
    model: nn.Module,
    *,
    adamw: Patterns = (),
    method: Patterns = (),
    head: nn.Module | Patterns | None = None,
    base_shapes: nn.Module | Mapping[str, Any] | None = None,
    match_adamw: bool = False,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for any isokron optimizer, found by module type, with any group setting.

    Embeddings (also one tied to a head), the output head, LoRA pairs, depthwise filters, norms and
    biases go to AdamW, the last two without weight decay; every other matrix gets the method.
    Fused projections, gates, grouped convolutions and experts of known modules are split into
    their matrices. Frozen parameters are left out. `print(isokron.describe(groups))` shows the
    result; see docs/routing.md.

    Patterns are matched against full names ("blocks.*.wq.weight"); the first match wins. A kind
    ("matrices", "embeddings", "heads", "norms", "vectors", …) is a pattern too: two learning rates,
    of hidden matrices and of everything else, are `lr_scale={"matrices": 1, "*": 8}`. A model in
    DDP, DataParallel, torch.compile or checkpointing is routed as the bare one, with its names.

    Args:
        model: The model, whose modules say what its parameters are.
        adamw: Patterns of parameters that AdamW steps.
        method: Patterns of matrices that get the method.
        head: The output layer, as a module or by patterns, where it would not be found.
        base_shapes: A narrow model of the same structure, or its shapes by parameter name, at whose
            width `lr` and `weight_decay` were chosen. The optimizer then scales both for the width
            of this model; see docs/width.md.
        match_adamw: `lr` is that of an AdamW run with one learning rate. The optimizer multiplies
            it by 2 for what the method steps and by 4 for everything else but LoRA pairs;
            isokron.AdamW leaves it as it is. See docs/from_adamw.md.
        **settings: Any setting of a group (docs/engine.md): a value for all groups, or a mapping
            of patterns to values. One value of `route` is for the matrices, and one of
            `weight_decay` for all but norms and biases. `stacked` also takes patterns alone.
            Examples: `split={"*.qkv.weight": 3}`, `lr_scale={"embeddings": 4, "head.*": 0.5}`,
            `weight_decay=0.1`.
    """
    if not isinstance(match_adamw, bool):
        raise ValueError(
            f"param_groups: match_adamw must be True or False, got {match_adamw!r}; AdamW's "
            "learning rate goes to the optimizer, as its own does"
        )
    check_multiples("param_groups", {"match_adamw": match_adamw, **settings})
    named = _trainable(model)
    model = unwrapped(model)
    kinds = find_kinds(model, _heads(model, named, head))
    parts = find_parts(model)
    base = {} if base_shapes is None else read_base_shapes(base_shapes, named)
    names_by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, param in named.items():
        names_by_kind[kinds[param]].append(name)
    usual, by_pattern = _split_settings(settings, named, names_by_kind)
    routes = _routes(adamw, method, named, names_by_kind)
    by_pattern["route"] = {**routes, **by_pattern.get("route", {})}
    groups: dict[str, dict[str, Any]] = {}
    guessed: dict[str, str] = {}
    for name, param in named.items():
        kind = kinds[param]
        special = {key: values[name] for key, values in by_pattern.items() if name in values}
        chosen = {**usual, **KINDS[kind], **parts.get(param, {}), **special}
        if chosen.get("vectors") and kind in ("norms", "vectors") and "route" not in special:
            chosen["route"] = usual["route"]
        if kind == "raw weights" and not special.keys() & {"route", "stacked", "split"}:
            table = param.ndim > 2 or is_table(param.shape, {**SHARED, **chosen})
            chosen["route"] = guessed[name] = "adamw" if table else usual["route"]
        raw_table = kind == "raw weights" and chosen["route"] == "adamw"
        if base.get(name, param.shape) != param.shape and kind not in UNSCALED and not raw_table:
            chosen["fans"] = fans_of(param.shape, base[name], {**SHARED, **chosen})
        # AdamW works element by element, so how a parameter is cut does not matter
        if chosen["route"] == "adamw":
            chosen = {k: v for k, v in chosen.items() if k not in ("stacked", "split", "split_dim")}
        else:
            if chosen.get("split") is None:
                chosen.pop("split_dim", None)
        # LoRA pairs are all that is trained: AdamW's learning rate was chosen for them
        if match_adamw and (kind, chosen["route"]) != ("adapters", "adamw"):
            chosen["match_adamw"] = True
        title = group_name(kind, chosen, usual)
        groups.setdefault(title, {"name": title, **chosen, "params": []})
        groups[title]["params"].append((name, param))
    if guessed:
        _warn_of_raw(named, guessed)
    return list(groups.values())


def group_name(kind: str, settings: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """What a group holds and how it differs; groups of one name have the same settings."""
    details = [] if settings["route"] == "method" else [settings["route"]]
    if depth := settings.get("stacked"):
        details.append("stacked" if depth == 1 else f"stacked {depth} deep")
    if (split := settings.get("split")) is not None:
        count = str(split) if isinstance(split, int) else "+".join(map(str, split))
        details.append(f"split in {count}" + (" by columns" if settings.get("split_dim") else ""))
    if fans := settings.get("fans"):
        details.append(" from ".join(f"{rows}×{cols}" for rows, cols in fans))
    texts = {"lr_scale": "lr × {}", "weight_decay": "decay {}"}
    for key in dict.fromkeys((*texts, *settings)):
        said = key in SAID or key not in settings
        if not said and (key not in usual or settings[key] != usual[key]):
            text = texts.get(key, f"{key} {{}}").format(settings[key])
            details.append("no decay" if key == "weight_decay" and not settings[key] else text)
    return f"{kind} ({', '.join(details)})" if details else kind


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes the model, not {type(model).__name__}: it looks at the modules "
            "that parameters belong to; write isokron.param_groups(model)"
        )
    named = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    for name, param in named.items():
        if isinstance(param, UninitializedParameter):
            raise ValueError(
                f"param_groups: {name!r} has no shape yet; run one forward pass through the model "
                "before asking what its parameters are"
            )
    if not named:
        raise ValueError("param_groups: the model has no parameter that requires a gradient")
    return named


def _split_settings(
    settings: Mapping[str, Any],
    named: Mapping[str, Tensor],
    names_by_kind: Mapping[str, Sequence[str]],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Values for all groups, and values by parameter name; wrong names and values are refused."""
    usual: dict[str, Any] = {"route": "method"}
    by_pattern: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        if key not in GROUP_KEYS:
            takes = {"adamw", "method", "head", "base_shapes", "match_adamw", *GROUP_KEYS}
            raise TypeError(unknown_keyword("param_groups", key, takes, takes))
        if key == "stacked" and isinstance(value, str | Sequence):
            value = dict.fromkeys([value] if isinstance(value, str) else value, 1)
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            by_pattern[key] = _lookup(value, named, key, names_by_kind)
            values = list(value.values())
        else:
            usual[key], values = value, [value]
        rule, holds = RULES.get(key, ("", lambda _: True))
        for value in values:
            require(holds(value), "param_groups", {key: value}, key, rule)
    return usual, by_pattern


def _routes(
    adamw: Patterns,
    method: Patterns,
    named: Mapping[str, Tensor],
    names_by_kind: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    routes = dict.fromkeys(_lookup(adamw, named, "adamw", names_by_kind), "adamw")
    for name in _lookup(method, named, "method", names_by_kind):
        if name in routes:
            raise ValueError(f"param_groups: {name!r} matches both adamw and method; keep one")
        if not is_matrix(named[name].shape):
            raise ValueError(
                f"param_groups: method matches {name!r} of shape {tuple(named[name].shape)}, "
                "which is not a matrix; only matrices can get the method"
            )
        routes[name] = "method"
    return routes


def _lookup(
    patterns: Mapping[str, Any] | Patterns,
    named: Mapping[str, Tensor],
    argument: str,
    names_by_kind: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """By name, the value of the first pattern that matches.

    A kind may have no parameter, as a model with a tied embedding has no head; every other pattern
    must match a name.
    """
    if not isinstance(patterns, Mapping):
        patterns = dict.fromkeys([patterns] if isinstance(patterns, str) else patterns, True)
    values: dict[str, Any] = {}
    for pattern, value in patterns.items():
        matches = names_by_kind.get(pattern) or [n for n in named if fnmatchcase(n, pattern)]
        if not matches and pattern not in names_by_kind:
            kinds = f"; kinds are {', '.join(names_by_kind)}" if names_by_kind else ""
            raise ValueError(
                f"param_groups: {argument} pattern {pattern!r} matches no trainable parameter; "
                f"names look like {', '.join(list(named)[:3])}{kinds}"
            )
        for name in matches:
            values.setdefault(name, value)
    return values


def _heads(
    model: nn.Module, named: Mapping[str, Tensor], head: nn.Module | Patterns | None
) -> set[Tensor] | None:
    """The weights of the head that the user names, if any."""
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
    return layer_weights(head)


def _warn_of_raw(named: Mapping[str, Tensor], routes: Mapping[str, str]) -> None:
    """Warn of weights that belong to no layer of a known type."""
    texts = []
    for to_adamw, fate in ((False, "taken as matrices"), (True, "left to AdamW")):
        shapes = [
            f"{name} {tuple(named[name].shape)}"
            for name, route in routes.items()
            if (route == "adamw") == to_adamw
        ]
        texts += [f"{fate}: {_first_four(shapes)}"] if shapes else []
    warnings.warn(
        f"param_groups: in no layer of a known type, {'; '.join(texts)}. Name them, by pattern, in "
        "adamw= if they are tables (such as positions), in stacked= if they are stacks of matrices "
        "(such as experts), in method= if they are matrices",
        stacklevel=3,
    )


def _first_four(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


# Parameters without modules, of which only the shape is known.


def is_table(shape: Sequence[int], group: Mapping[str, Any]) -> bool:
    """Whether a matrix is shaped like an embedding or a head: too long, too tall or too wide."""
    rows, columns = _sides(shape, group)
    long = group["max_rows"] is not None and rows > group["max_rows"]
    return long or rows > TALL * columns or columns > WIDE * rows


def is_end(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether it is the first or last of several matrices, with more rows than columns.

    Models begin with their embedding and end with their head, which for a small vocabulary may have
    the shape of an MLP's matrix.
    """

    def matrices(params: Iterable[Tensor]) -> Iterator[Tensor]:
        return (p for p in params if is_matrix(p.shape, group["stacked"]))

    params = group["params"]
    if all(next(matrices(side), None) is not param for side in (params, reversed(params))):
        return False
    rows, columns = _sides(param.shape, group)
    return rows > columns and len(list(islice(matrices(params), SEVERAL))) == SEVERAL


def _sides(shape: Sequence[int], group: Mapping[str, Any]) -> tuple[int, int]:
    """[first, product of the others] of one of stacked matrices, or of the largest split part."""
    sides = list(shape[group["stacked"] :])
    if group["split"] is not None:
        dim = group["split_dim"]
        sides[dim] = max(split_sizes(sides, group["split"], dim))
    return sides[0], math.prod(sides[1:])


def fans_of(
    shape: Sequence[int], base: Sequence[int], group: Mapping[str, Any]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(outputs, inputs) of a parameter's matrix, and of that of the narrow model, of shape `base`.

    Of a split parameter it is the largest part; `split_dim` is the dimension of the outputs.
    """
    rows, cols = _sides(shape, group)
    (size, *others), (base_size, *base_others) = shape[group["stacked"] :], base[group["stacked"] :]
    base_rows = max(1, round(rows * base_size / size))
    base_cols = max(1, round(cols * math.prod(base_others) / math.prod(others)))
    if group["split_dim"]:
        return (cols, rows), (base_cols, base_rows)
    return (rows, cols), (base_rows, base_cols)


def gets_method(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the method steps a parameter of a group; AdamW steps the others."""
    if group["route"] == "adamw":
        return False
    if is_matrix(param.shape, group["stacked"]):
        table = group["route"] == "auto" and (is_table(param.shape, group) or is_end(param, group))
        return not table
    return bool(group["vectors"]) and group["route"] != "spectral" and param.numel() > 1


def warn_of_tables(optimizer: "Preconditioned", group: Mapping[str, Any]) -> None:
    """Warn of matrices that go to AdamW only because of their shape."""
    method = {**group, "route": "method"} if group["route"] == "auto" else group
    takes = optimizer.traits.takes
    tables = [
        param_name(group, i) + (f" {tuple(param.shape)}" if group.get("param_names") else "")
        for i, param in enumerate(group["params"])
        if param.numel() and takes(param, method) and not takes(param, group)
    ]
    if not tables:
        return
    # point the warning at the first caller that is neither isokron nor torch
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("isokron", "torch"):
        level, frame = level + 1, frame.f_back
    who = type(optimizer).__name__
    warnings.warn(
        f"{who}: AdamW steps what is shaped like an embedding or a head: {_first_four(tables)}. "
        f"That is a matrix of more than max_rows={group['max_rows']} rows, of more than {TALL} "
        f"rows a column or of more than {WIDE} columns a row, or a tall one that is first or last "
        f"of {SEVERAL} or more. Better let {who}(isokron.param_groups(model)) find them by module "
        "type, or give every matrix the method by route='method' in its group",
        stacklevel=level,
    )


# A table of groups.

HEADER = ("group", "stepped by", "tensors", "elements", "decay", "lr scale", "such as")


def describe(subject: Any) -> str:
    """A table of parameter groups, one line each: which optimizer steps what.

    `subject`: an optimizer, parameter groups, or a model, of which `param_groups` makes groups.
    "decay" and "lr scale" are the group's own, "-" where it leaves them to the optimizer.
    """
    optimizer = subject if hasattr(subject, "traits") else None
    groups = param_groups(subject) if isinstance(subject, nn.Module) else subject
    groups = optimizer.param_groups if optimizer is not None else groups
    ok = isinstance(groups, Sequence) and len(groups) > 0
    if not ok or not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise TypeError(
            "describe takes an isokron optimizer, its param_groups, the groups of "
            f"isokron.param_groups or a model, got {type(subject).__name__}"
        )
    lines = [HEADER, *(line for group in groups for line in _lines(group, optimizer))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 2 <= i <= 5 else cell.ljust(width)  # numbers to the right
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _lines(group: Mapping[str, Any], optimizer: Any) -> list[tuple[str, ...]]:
    """One line, or two where the shapes of a group's parameters decide which optimizer steps."""
    pairs = [p if isinstance(p, tuple) else ("", p) for p in group["params"]]
    names = group.get("param_names") or [name for name, _ in pairs]
    params = [param for _, param in pairs]
    settings = {**SHARED, **group, "params": params}
    takes = gets_method if optimizer is None else optimizer.traits.takes
    method = "the method" if optimizer is None else type(optimizer).__name__
    method = "spectral descent" if settings["route"] == "spectral" else method
    by_stepper: dict[str, list[tuple[str, Tensor]]] = {}
    for name, param in zip(names, params, strict=True):
        stepper = method if takes(param, settings) else "AdamW"
        by_stepper.setdefault(stepper, []).append((name, param))
    scales = dict.fromkeys((method, "AdamW"), group.get("lr_scale"))
    if group.get("match_adamw"):
        scales = {method: METHOD_MULTIPLE, "AdamW": REST_MULTIPLE}
    return [
        (
            str(group.get("name", "parameters")),
            stepper,
            str(len(members)),
            f"{sum(param.numel() for _, param in members):,}",
            *(
                "-" if value is None else f"{float(value):g}"
                for value in (group.get("weight_decay"), scales[stepper])
            ),
            f"{members[0][0]} {list(members[0][1].shape)}".strip(),
        )
        for stepper, members in by_stepper.items()
    ]
