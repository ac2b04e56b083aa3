"""Which parameters are matrices of a layer, and which AdamW should step: by what they are."""

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from isokron.optim.blocks import is_matrix

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
RECURRENT = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}  # gates in one weight
LAYERS = (
    *(nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
    *(ParametrizationList, nn.ParameterDict, nn.ParameterList),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "matrices": {"route": "auto"},
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

    Embeddings (also one tied to a head), the output head, depthwise filters, norms and biases go
    to AdamW, the last two without weight decay; every other matrix gets the method. A LoRA pair
    follows the layer it adapts. The input projection of nn.MultiheadAttention counts as three
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
    owners = _owners(model)
    kinds = _kinds(model, owners)
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
        settings = {**SETTINGS[kind], **_layout(param, owners[param])}
        if name in to_method:
            if not is_matrix(param.shape):
                raise ValueError(
                    f"param_groups: method matches {name!r} of shape {tuple(param.shape)}, "
                    "which is not a matrix; only matrices can get the method"
                )
            settings["route"] = "auto"
        elif name in to_adamw:
            settings["route"] = "adamw"
        settings |= {key: found[name] for key, found in overrides.items() if name in found}
        told = name in to_method or "stacked" in settings or "split" in settings
        if settings["route"] == "auto" and not told and not _in_layer(owners[param]):
            raw[name] = param
        if settings["route"] == "adamw":  # AdamW works element by element
            for key in ("stacked", "split", "split_dim"):
                settings.pop(key, None)
        group = groups.setdefault(repr((kind, settings)), {"name": kind, **settings, "params": []})
        group["params"].append((name, param))
    if raw:
        _warn_of_raw(raw)
    return list(groups.values())


def _kinds(model: nn.Module, owners: Mapping[Tensor, list[nn.Module]]) -> dict[Tensor, str]:
    """What every parameter is: a key of SETTINGS."""
    pairs = _adapters(model)
    heads = _heads(model, set(pairs))

    def kind(param: Tensor) -> str:
        mine = owners[param]
        if any(isinstance(module, EMBEDDINGS) for module in mine):
            return "embeddings"
        if any(isinstance(module, NORMS) for module in mine):
            return "norms"
        if not is_matrix(param.shape):
            return "vectors"
        if param in heads:
            return "heads"
        if any(isinstance(m, _ConvNd) and m.groups == m.in_channels > 1 for m in mine):
            return "filters"
        return "matrices"

    kinds = {param: kind(param) for param in owners}
    for param, base in pairs.items():
        if kinds[base] in ("embeddings", "heads"):
            kinds[param] = kinds[base]
    return kinds


def _owners(model: nn.Module) -> dict[Tensor, list[nn.Module]]:
    """Every module that holds a parameter; a tied one has several."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(module)
    return owners


def _layout(param: Tensor, owners: Iterable[nn.Module]) -> dict[str, Any]:
    """How a parameter is several matrices, where its module's type says so."""
    for module in owners:
        if isinstance(module, nn.MultiheadAttention) and param is module.in_proj_weight:
            return {"split": 3, "split_dim": 0}
        if isinstance(module, _ConvNd) and module.groups > 1 and param is module.weight:
            return {"split": module.groups, "split_dim": 0}
        gates = next((n for kind, n in RECURRENT.items() if isinstance(module, kind)), 0)
        if gates and param.size(0) == gates * int(module.hidden_size):  # type: ignore[arg-type]
            return {"split": gates, "split_dim": 0}
        if _is_transposed(module) and param is module.weight:
            return {"split_dim": 1}
    return {}


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


def _in_layer(owners: Iterable[nn.Module]) -> bool:
    return any(isinstance(module, LAYERS) or _is_transposed(module) for module in owners)


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D: a linear layer that keeps its weight as [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _heads(model: nn.Module, adapters: set[Tensor]) -> set[Tensor]:
    """The weights of the output layer.

    Models that say which it is are asked (`get_output_embeddings`). Else it is the last linear
    layer, if others come before it and it does not sit inside one of several like blocks.
    """
    said = getattr(model, "get_output_embeddings", None)
    head = said() if callable(said) else None
    if isinstance(head, nn.Module):
        return _matrices(head)
    layers = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or _is_transposed(module))
        and module.weight not in adapters
    }
    matrices = [p for p in model.parameters() if is_matrix(p.shape) and p not in adapters]
    if not layers or len(matrices) < 2:
        return set()
    name, last = list(layers.items())[-1]
    return set() if _in_repeated_block(model, name) else _matrices(last)


def _matrices(module: nn.Module) -> set[Tensor]:
    """A layer's matrices, also where its weight is computed from them (weight norm, adapters)."""
    return {param for param in module.parameters() if is_matrix(param.shape)}


def _in_repeated_block(model: nn.Module, name: str) -> bool:
    """Whether a module around this one, below the model, has a sibling of its class and shapes."""
    path = name.split(".")
    for depth in range(1, len(path)):
        parent = model.get_submodule(".".join(path[: depth - 1]))
        around = _likeness(parent.get_submodule(path[depth - 1]))
        if sum(_likeness(child) == around for child in parent.children()) > 1:
            return True
    return False


def _likeness(module: nn.Module) -> tuple[type, list[torch.Size]]:
    return type(module), [param.shape for param in module.parameters()]


def _adapters(model: nn.Module) -> dict[Tensor, Tensor]:
    """LoRA pairs: trainable [r, n] and [m, r], r < min(m, n), beside a frozen weight [m, n].

    They are looked for in the module that holds the weight (or its wrapper) and in its containers
    of adapters, each mapped to the weight they adapt.
    """
    found: dict[Tensor, Tensor] = {}
    for module in model.modules():
        near = _nearby(module)
        trained = [param for param in near if param.requires_grad]
        for base in (param for param in near if not param.requires_grad):
            for down, up in itertools.permutations(trained, 2):
                if _is_pair(base, down, up):
                    found[down] = found[up] = base
    return found


def _nearby(module: nn.Module) -> list[Tensor]:
    """Matrices of a module that adapts one layer: its own, its layer's and its adapters'."""
    containers = (nn.ModuleDict, nn.ParameterDict, nn.ParameterList, nn.ModuleList)
    near: list[Tensor] = list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, containers):
            near += [p for leaf in child.children() for p in leaf.parameters(recurse=False)]
        near += child.parameters(recurse=False)
    return [param for param in near if param.ndim == 2]


def _is_pair(base: Tensor, down: Tensor, up: Tensor) -> bool:
    """Whether up·down, or its transpose, is a low-rank change of the weight."""
    rank = down.size(0)
    product = (up.size(0), down.size(1))
    return up.size(1) == rank < min(base.shape) and product in (base.shape, base.shape[::-1])


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
