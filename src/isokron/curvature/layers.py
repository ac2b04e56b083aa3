"""The layers of a model as matrices, and modules of other types.

A layer is y = W ā. W is [B, o, i], a bias its last column: B blocks that do not mix, such as the
groups of a convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

PARTS = ("q", "k", "v")  # of the packed projection of nn.MultiheadAttention
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
RMS_NORMS = ("RMSNorm", "T5LayerNorm")  # ends of the class names of transformers' own norms
EPSILONS = ("eps", "variance_epsilon", "epsilon")
Names = Mapping[Tensor, str]  # of parameters
# name, type and sizes by parameter of a module whose curvature is not known
Unknown = tuple[str, str, dict[str, int]]


@dataclass(frozen=True)
class Layout:
    """How a layer's parameters make a matrix [B, o, i], a bias its last column.

    kind: inputs are "dense", or the "index" of a column, as in an embedding; "diagonal" where every
        weight has an input and an output of its own, as in a norm, or for a bias alone.
    params: names of "weight" and "bias" in the model; shapes: their shapes in this layer.
    transposed: the weight is [i, o]. groups: B, of a convolution.
    rows: first and last row, for parameters that several layers share.
    """

    kind: str
    params: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    transposed: bool = False
    groups: int = 1
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def bias(self) -> bool:
        return "bias" in self.params

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, o, i), the column of a bias included."""
        if self.kind == "diagonal":
            return 1, len(self.params), prod(self.shapes[next(iter(self.params))])
        first, *sizes = self.shapes["weight"]
        if self.transposed:
            return 1, sizes[0], first + self.bias
        return self.groups, first // self.groups, prod(sizes) + self.bias

    def part(self, key: str, tensor: Tensor) -> Tensor:
        """The layer's rows of a parameter, as a view."""
        return tensor[slice(*self.rows[key])] if key in self.rows else tensor


def pack(layout: Layout, tensors: Mapping[str, Tensor]) -> Tensor:
    """Tensors shaped like parameters, by the model's names, as one batch of matrices [B, o, i]."""
    parts = {
        key: layout.part(key, tensors[name]).reshape(layout.shapes[key])
        for key, name in layout.params.items()
    }
    if layout.kind == "diagonal":
        return torch.stack([value.flatten() for value in parts.values()])[None]
    weight = parts["weight"]
    if layout.transposed:
        matrix = weight.mT[None]
    else:
        matrix = weight.reshape(layout.groups, len(weight) // layout.groups, -1)
    if not layout.bias:
        return matrix
    return torch.cat([matrix, parts["bias"].reshape(*matrix.shape[:2], 1)], 2)


def unpack(layout: Layout, matrix: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack`, by the keys "weight" and "bias"."""
    shapes = layout.shapes
    if layout.kind == "diagonal":
        return {key: row.reshape(shapes[key]) for key, row in zip(shapes, matrix[0], strict=True)}
    weight = matrix[..., :-1] if layout.bias else matrix
    weight = weight[0].mT if layout.transposed else weight
    parts = {"weight": weight.reshape(shapes["weight"])}
    return {**parts, "bias": matrix[..., -1].flatten()} if layout.bias else parts


@dataclass(frozen=True, eq=False)
class Layer:
    """A weight with its bias, seen as a matrix.

    observed: by a hook on its "module", in the "product" torch.nn.functional.linear(·, weight)
        within a module, or as one of the "experts" of a module.
    tied: other layers with the same parameters, whose uses count as uses of this one.
    """

    name: str
    module: nn.Module
    layout: Layout
    observed: str = "module"
    tied: tuple["Layer", ...] = ()

    @property
    def kind(self) -> str:
        """ "dense", "index" or "diagonal": see Layout."""
        return self.layout.kind

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, o, i), the column of a bias included."""
        return self.layout.shape

    @property
    def columns(self) -> int:
        """Columns of W where inputs are numbers of columns, else 0."""
        return self.shape[2] if self.kind == "index" else 0

    @property
    def parameters(self) -> int:
        return prod(self.shape)

    @property
    def has_weight(self) -> bool:
        return "weight" in self.layout.params

    @property
    def is_linear(self) -> bool:
        dense = self.kind == "dense" and self.observed == "module"
        return dense and not isinstance(self.module, _ConvNd)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that torch.compile has wrapped, whose names are those users know."""
    return getattr(model, "_orig_mod", model)


def all_layers(model: nn.Module) -> tuple[list[Layer], list[Unknown]]:
    """Every layer of a known type, and modules of other types that have parameters.

    A parameter that several modules share has the first of its names in all of them.
    """
    model = unwrapped(model)
    names: Names = {param: name for name, param in model.named_parameters()}
    layers: list[Layer] = []
    unknown: list[Unknown] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        params = dict(module.named_parameters(recurse=False))
        count, reason = len(layers), type(module).__name__
        if isinstance(module, nn.MultiheadAttention):
            # out_proj is an nn.Linear that is never called: attention takes its weight
            inside |= set(module.modules())
            layers += _attention(name, module, names)
            params = dict(module.named_parameters())
        # weights that are not floating-point are quantized, and have no gradient
        elif params and all(param.is_floating_point() for param in params.values()):
            kind = _kind(module)
            if kind is not None and "weight" in params:
                own = {key: params[key] for key in ("weight", "bias") if key in params}
                layers.append(_layer(name, module, kind, "module", own, names))
            elif getattr(module, "scale_grad_by_freq", False):
                reason = "scale_grad_by_freq"
            elif kind is not None:  # a parametrization or a pruning mask
                reason = f"its weight is computed from {_sources(module)}"
            elif _is_router(module, params):
                layers.append(_layer(name, module, "dense", "product", params, names))
            elif _is_experts(module):
                layers += _experts(name, module, names)
        covered = {x for layer in layers[count:] for x in layer.layout.params.values()}
        others = {key: param for key, param in params.items() if names[param] not in covered}
        if others:
            sizes = {names[param]: param.numel() for param in others.values()}
            what = name or "the model itself"
            if covered and not any(param.requires_grad for param in others.values()):
                what, reason = ", ".join(sizes), "frozen"
            unknown.append((what, reason, sizes))
    return layers, unknown


def _sources(module: nn.Module) -> str:
    """Names of what the weight of a module is computed from."""
    names = [name for name, _ in module.named_parameters() if name != "bias"]
    return ", ".join(names) or "no parameter"


def _kind(module: nn.Module) -> str | None:
    """The kind of layer that a module of a known type is."""
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or _is_conv1d(module):
        return "dense"
    # other subclasses compute something else, and gradients that are divided by counts of the batch
    # belong to no example
    plain = type(module).forward is nn.Embedding.forward or embedding_scale(module) is not None
    if isinstance(module, nn.Embedding) and plain:
        return None if module.scale_grad_by_freq else "index"
    return "diagonal" if isinstance(module, NORMS) or _is_rms_norm(module) else None


def embedding_scale(module: Any) -> Any:
    """What transformers' scaled embeddings multiply their rows by, or None."""
    return getattr(module, "embed_scale", None) if isinstance(module, nn.Embedding) else None


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' linear layer, with a weight [i, o]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_rms_norm(module: nn.Module) -> bool:
    """transformers has a class for every architecture, with a weight and an epsilon."""
    names = [name for name, _ in module.named_parameters()]
    by_name = type(module).__name__.endswith(RMS_NORMS)
    return by_name and names == ["weight"] and epsilon_of(module) is not None


def epsilon_of(norm: nn.Module) -> float | None:
    values = (getattr(norm, name, None) for name in EPSILONS)
    return next((value for value in values if isinstance(value, float)), None)


def _is_router(module: nn.Module, params: Mapping[str, Tensor]) -> bool:
    """transformers' routers of mixtures of experts: linear layers with a forward of their own."""
    linear = list(params) in (["weight"], ["weight", "bias"]) and params["weight"].ndim == 2
    return linear and type(module).__name__.endswith("Router")


def _is_experts(module: nn.Module) -> bool:
    """Stacked weights, as transformers' `use_experts_implementation` has them."""
    stacked = hasattr(module, "_apply_gate") and hasattr(module, "down_proj")
    return stacked and not getattr(module, "has_post_expert_norm", True)


def _layer(
    name: str,
    module: Any,
    kind: str,
    observed: str,
    params: Mapping[str, Tensor],
    names: Names,
    rows: Mapping[str, tuple[int, int]] | None = None,
) -> Layer:
    """Without parameters that are frozen beside others. rows: of parameters that several layers
    share; one row of three dimensions is a matrix."""
    trained = {key: param for key, param in params.items() if param.requires_grad}
    if observed != "experts" and trained:
        params = trained
    kind = kind if "weight" in params else "diagonal"  # of a bias alone
    rows = {key: cut for key, cut in (rows or {}).items() if key in params}
    shapes = {}
    for key, param in params.items():
        count = rows[key][1] - rows[key][0] if key in rows else len(param)
        first = () if observed == "experts" else (count,)
        shapes[key] = (*first, *param.shape[1:])
    layout = Layout(
        kind,
        {key: names[param] for key, param in params.items()},
        shapes,
        transposed=kind == "index" or _is_conv1d(module) or getattr(module, "is_transposed", False),
        groups=module.groups if isinstance(module, _ConvNd) and kind == "dense" else 1,
        rows=rows,
    )
    return Layer(name.removeprefix("."), module, layout, observed)


def _attention(name: str, module: nn.MultiheadAttention, names: Names) -> list[Layer]:
    """Query, key and value projections, packed or not, and the projection of the output."""
    packed, bias = module.in_proj_weight is not None, module.in_proj_bias
    layers = []
    for i, part in enumerate(PARTS):
        weight = getattr(module, "in_proj_weight" if packed else f"{part}_proj_weight")
        params = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        cut = (i * module.embed_dim, (i + 1) * module.embed_dim)
        rows = {key: cut for key in params if packed or key == "bias"}
        layers.append(_layer(f"{name}.{part}", module, "dense", "product", params, names, rows))
    out = dict(module.out_proj.named_parameters())
    return [*layers, _layer(f"{name}.out_proj", module, "dense", "product", out, names)]


def _experts(name: str, module: Any, names: Names) -> list[Layer]:
    """The two products of every expert, [E, o, i] or, transposed, [E, i, o] in one parameter."""
    layers = []
    for expert in range(len(module.down_proj)):
        for part in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            params = {"weight": getattr(module, part)}
            if module.has_bias:
                params["bias"] = getattr(module, f"{part}_bias")
            rows = dict.fromkeys(params, (expert, expert + 1))
            title = f"{name}.{expert}.{part}"
            layers.append(_layer(title, module, "dense", "experts", params, names, rows))
    return layers
