"""The layers of a model as matrices: which have curvature, and why the others have not.

A layer is y = W ā. W is [B, o, i], a bias its last column: B blocks that do not mix, such as the
groups of a convolution.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("q", "k", "v")  # of the packed projection of nn.MultiheadAttention
MAX_SIDE = 8192  # a larger side makes a matrix of more than 256 MB
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
RMS_NORMS = ("RMSNorm", "T5LayerNorm")  # ends of the class names of transformers' own norms
EPSILONS = ("eps", "variance_epsilon", "epsilon")
KNOWN = (
    "Linear, Conv1d to Conv3d, Embedding, MultiheadAttention, LayerNorm, GroupNorm, RMSNorm and "
    "transformers' Conv1D, norms, routers and experts"
)
Names = Mapping[Tensor, str]  # of parameters
# name, type and sizes by parameter of a module whose curvature is not known
Unknown = tuple[str, str, dict[str, int]]


@dataclass(frozen=True)
class Layout:
    """How a layer's parameters make a matrix [B, o, i], a bias its last column.

    kind: inputs are "dense", or the "index" of a column, as in an embedding; "diagonal" where every
        weight has an input and an output of its own, as in a norm.
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
    """

    name: str
    module: nn.Module
    layout: Layout
    observed: str = "module"

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
    def is_linear(self) -> bool:
        dense = self.kind == "dense" and self.observed == "module"
        return dense and not isinstance(self.module, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class LeftOut:
    """A layer or module without curvature. parameters: those not counted elsewhere."""

    name: str
    reason: str
    parameters: int


@dataclass(frozen=True, eq=False)
class Selection:
    """Layers that have curvature, the others with reasons, and all parameters counted once."""

    layers: list[Layer]
    left_out: list[LeftOut]
    total: int

    @property
    def covered(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def summary(self) -> str:
        """One line: "covers 106 of 135 M parameters; left out: lm_head (49,152 outputs)"."""
        units = ((1e9, " B"), (1e6, " M"), (0, ""))
        size, unit = next(pair for pair in units if self.total >= pair[0])
        digits = int(self.total < 100 * size)
        shown = [f"{count / (size or 1):,.{digits}f}" for count in (self.covered, self.total)]
        names: dict[str, list[str]] = {}
        for item in self.left_out:
            names.setdefault(item.reason, []).append(item.name)
        groups = [
            f"{', '.join(group[:3])}{f' + {len(group) - 3} more' * (len(group) > 3)} ({reason})"
            for reason, group in names.items()
        ]
        left_out = f"; left out: {', '.join(groups)}" if groups else ""
        return f"covers {shown[0]} of {shown[1]}{unit} parameters{left_out}"

    def without(self, reasons: Mapping[str, str]) -> "Selection":
        """The same with some layers left out, by name."""
        dropped = [x for x in self.layers if x.name in reasons]
        left_out = [LeftOut(x.name, reasons[x.name], x.parameters) for x in dropped]
        layers = [x for x in self.layers if x.name not in reasons]
        return replace(self, layers=layers, left_out=self.left_out + left_out)


def find_layers(
    model: nn.Module,
    patterns: str | Iterable[str] | None = None,
    *,
    max_side: int | None = MAX_SIDE,
    head: str = "skip",
) -> Selection:
    """The layers of a model whose curvature is to be known.

    Args:
        patterns: names of layers or of modules around them, such as `"model.layers.*.mlp,!*.norm"`:
            fnmatch patterns, separated by commas or in a list; "!" excludes. None: all layers but
            embeddings, layers with a side above `max_side`, and frozen layers of a model that is
            trained in part. What a pattern names is taken in all the same, but for heads.
        max_side: most inputs and outputs of a layer; None for no limit.
        head: "lowrank" takes in linear layers of more than `max_side` outputs, "skip" only those
            that a pattern without wildcards names.
    """
    if head not in ("skip", "lowrank"):
        raise ValueError(f"head must be 'skip' or 'lowrank', got {head!r}")
    layers, unknown = all_layers(model)
    included, excluded = _parse_patterns(patterns, model, layers)
    reasons: dict[str, str] = {}
    for layer in layers:
        large = _large(layer, max_side)
        is_head = layer.is_linear and large.endswith("outputs")
        if _matches(layer.name, excluded):
            reasons[layer.name] = "excluded"
        elif included and not _matches(layer.name, included):
            reasons[layer.name] = "not named in layers"
        # a pattern such as "*" does not ask for a matrix of vocabulary by vocabulary
        elif is_head and head == "skip" and layer.name not in included:
            reasons[layer.name] = large
        elif not included and not is_head and (reason := large or _by_default(layer, model)):
            reasons[layer.name] = reason
    _drop_tied_(reasons, layers, max_side if head == "lowrank" else None)
    sizes = {layer.name: _sizes(layer) for layer in layers}
    counted = {key for name in sizes if name not in reasons for key in sizes[name]}
    # a parameter is counted once, where it is covered or first left out
    left_out = []
    for name, reason, params in [*((x, y, sizes[x]) for x, y in reasons.items()), *unknown]:
        size = sum(size for key, size in params.items() if key not in counted)
        left_out.append(LeftOut(name, reason, size))
        counted |= set(params)
    layers = [layer for layer in layers if layer.name not in reasons]
    if not layers:
        names = ", ".join(f"{item.name} ({item.reason})" for item in left_out[:6])
        raise ValueError(
            f"no layer to observe in {type(model).__name__} with layers={patterns!r}; known are "
            f"{KNOWN}; left out: {names or 'nothing'}; a pattern that names a layer takes it in"
        )
    return Selection(layers, left_out, sum(param.numel() for param in model.parameters()))


def _by_default(layer: Layer, model: nn.Module) -> str:
    """Why a layer is left out where no pattern names it, or ""."""
    if layer.kind == "index":
        return "embedding"
    # a model of which nothing is trained is looked at as a whole
    trained = any(param.requires_grad for param in model.parameters())
    frozen = not any(param.requires_grad for param in layer.module.parameters())
    return "frozen" if trained and frozen else ""


def _drop_tied_(reasons: dict[str, str], layers: list[Layer], max_side: int | None) -> None:
    """A weight belongs to the first layer that has it, to a head before an embedding."""
    owners: dict[str, str] = {}
    for layer in sorted(layers, key=lambda x: not (x.is_linear and _large(x, max_side))):
        if layer.name in reasons:
            continue
        owner = next((owners[key] for key in _sizes(layer) if key in owners), None)
        if owner is None:
            owners |= dict.fromkeys(_sizes(layer), layer.name)
        else:
            reasons[layer.name] = f"shares its weight with {owner}"


def _large(layer: Layer, max_side: int | None) -> str:
    """The side that is too large, or "". The input side of an embedding is a diagonal."""
    sides = {"outputs": layer.shape[1], "inputs": layer.shape[2] * (layer.kind == "dense")}
    limit = None if layer.kind == "diagonal" else max_side
    return next((f"{n:,} {side}" for side, n in sides.items() if limit and n > limit), "")


def _sizes(layer: Layer) -> dict[str, int]:
    """Elements of the parameters of a layer, or of its rows of them."""
    params, rows, shapes = layer.layout.params, layer.layout.rows, layer.layout.shapes
    return {f"{name}{rows.get(key, '')}": prod(shapes[key]) for key, name in params.items()}


def _parse_patterns(
    patterns: str | Iterable[str] | None, model: nn.Module, layers: Sequence[Layer]
) -> tuple[list[str], list[str]]:
    """Patterns that include and that exclude; each must match a module or a layer."""
    if patterns is None:
        return [], []
    texts = [patterns] if isinstance(patterns, str) else list(patterns)
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"layers must name at least one pattern, got {patterns!r}; None takes all")
    names = [name for name, _ in _unwrapped(model).named_modules()] + [x.name for x in layers]
    for part in parts:
        pattern = part.removeprefix("!")
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern.strip("*."), dict.fromkeys(names), 3, 0.5)
            near = near or [layer.name for layer in layers[:3]]
            raise ValueError(f"layers: {part!r} matches no module; near are {', '.join(near)}")
    excluded = [part[1:] for part in parts if part.startswith("!")]
    return [part for part in parts if not part.startswith("!")], excluded


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a layer or a module around it."""
    parts = name.split(".")
    around = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(outer, pattern) for outer in around for pattern in patterns)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model that torch.compile has wrapped, whose names are those users know."""
    return getattr(model, "_orig_mod", model)


def all_layers(model: nn.Module) -> tuple[list[Layer], list[Unknown]]:
    """Every layer of a known type, and modules of other types that have parameters.

    A parameter that several modules share has the first of its names in all of them.
    """
    model = _unwrapped(model)
    names: Names = {param: name for name, param in model.named_parameters()}
    layers: list[Layer] = []
    unknown: list[Unknown] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        params = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.MultiheadAttention):
            # out_proj is an nn.Linear that is never called: attention takes its weight
            inside |= set(module.modules())
            layers += _attention(name, module, names)
            params = {key: params[key] for key in ("bias_k", "bias_v") if key in params}
        # weights that are not floating-point are quantized, and have no gradient
        elif params and all(param.is_floating_point() for param in params.values()):
            kind = _kind(module)
            if kind is not None:
                layers.append(_layer(name, module, kind, "module", params, names))
            elif _is_router(module, params):
                layers.append(_layer(name, module, "dense", "product", params, names))
            elif _is_experts(module):
                layers += _experts(name, module, names)
            params = params if not layers or layers[-1].module is not module else {}
        if params:
            sizes = {names[param]: param.numel() for param in params.values()}
            unknown.append((name or "the model itself", type(module).__name__, sizes))
    return layers, unknown


def _kind(module: nn.Module) -> str | None:
    """The kind of layer that a module of a known type is."""
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or _is_conv1d(module):
        return "dense"
    # a subclass that scales its rows has gradients other than those of a table
    if type(module).forward is nn.Embedding.forward:
        return "index"
    return "diagonal" if isinstance(module, NORMS) or _is_rms_norm(module) else None


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
    """rows: of parameters that several layers share; one row of three dimensions is a matrix."""
    rows = dict(rows or {})
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
        groups=module.groups if isinstance(module, nn.modules.conv._ConvNd) else 1,
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
