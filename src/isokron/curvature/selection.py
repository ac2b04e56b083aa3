"""Which layers of a model have curvature, and why the others have not."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import nn

from isokron.curvature.layers import Layer, all_layers, unwrapped

MAX_SIDE = 8192  # a larger side makes a matrix of more than 256 MB
KNOWN = (
    "Linear, Conv1d to Conv3d, Embedding, MultiheadAttention, LayerNorm, GroupNorm, RMSNorm and "
    "transformers' Conv1D, norms, routers and experts"
)


@dataclass(frozen=True)
class LeftOut:
    """A layer or module without curvature. parameters: those not counted elsewhere."""

    name: str
    reason: str
    parameters: int


@dataclass(frozen=True, eq=False)
class Selection:
    """Layers that have curvature, the others with reasons, and all parameters counted once.

    compared: how many layers' gradients were compared with autograd, 0 if none were, of which
    `agreeing` are the same.
    """

    layers: list[Layer]
    left_out: list[LeftOut]
    total: int
    compared: int = 0
    agreeing: int = 0

    @property
    def covered(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def summary(self) -> str:
        """One line: "gradients of 210 of 210 layers agree with autograd; covers 106 of 135 M
        parameters; left out: lm_head (49,152 outputs)"."""
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
        counts = f"{self.agreeing} of {self.compared}"
        pairs = [", ".join((x.name, *(y.name for y in x.tied))) for x in self.layers if x.tied]
        tied = f" ({' and '.join(pairs)} share a weight)" * bool(pairs)
        checked = f"gradients of {counts} layers agree with autograd; " * bool(self.compared)
        return f"{checked}covers {shown[0]} of {shown[1]}{unit} parameters{tied}{left_out}"

    def without(self, reasons: Mapping[str, str]) -> "Selection":
        """The same with some layers left out, by name."""
        dropped = [x for x in self.layers if x.name in reasons]
        left_out = [LeftOut(x.name, reasons[x.name], x.parameters) for x in dropped]
        layers = [x for x in self.layers if x.name not in reasons]
        return replace(self, layers=layers, left_out=self.left_out + left_out)

    def record(self) -> dict[str, Any]:
        """What is covered, for JSON."""
        left_out = [asdict(item) for item in self.left_out]
        counts = {"covered": self.covered, "total": self.total}
        return {**counts, "summary": self.summary(), "left_out": left_out}


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
    trained = {name for name, x in unwrapped(model).named_parameters() if x.requires_grad}
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
        elif not included and not is_head and (reason := large or _by_default(layer, trained)):
            reasons[layer.name] = reason
    tied = _tied_layers(reasons, layers)
    sizes = {layer.name: _sizes(layer) for layer in layers}
    counted = {key for name in sizes if name not in reasons for key in sizes[name]}
    joined = {layer.name for of_owner in tied.values() for layer in of_owner}
    # a parameter is counted once, where it is covered or first left out
    left_out = []
    for name, reason, params in [*((x, y, sizes[x]) for x, y in reasons.items()), *unknown]:
        if name in joined:  # nothing of it is left out
            continue
        size = sum(size for key, size in params.items() if key not in counted)
        left_out.append(LeftOut(name, reason, size))
        counted |= set(params)
    layers = [replace(x, tied=tied.get(x.name, ())) for x in layers if x.name not in reasons]
    if not layers:
        names = ", ".join(f"{item.name} ({item.reason})" for item in left_out[:6])
        raise ValueError(
            f"no layer to observe in {type(model).__name__} with layers={patterns!r}; known are "
            f"{KNOWN}; left out: {names or 'nothing'}; a pattern that names a layer takes it in"
        )
    return Selection(layers, left_out, sum(param.numel() for param in model.parameters()))


def _by_default(layer: Layer, trained: set[str]) -> str:
    """Why a layer is left out where no pattern names it, or ""."""
    if layer.kind == "index":
        return "embedding"
    # a model of which nothing is trained is looked at as a whole
    return "frozen" if trained and trained.isdisjoint(layer.layout.params.values()) else ""


def _tied_layers(reasons: dict[str, str], layers: list[Layer]) -> dict[str, tuple[Layer, ...]]:
    """By owner, the layers that have its parameters: every use of a weight is in its gradient.

    A weight belongs to the first layer that has it, to a linear one before an embedding, which has
    no place for the outputs of others. Others that do not fit are left out of `layers`.
    """
    owners: dict[str, Layer] = {}
    for layer in sorted(layers, key=lambda x: x.kind == "index"):
        if layer.name in reasons:
            continue
        owner = next((owners[key] for key in _sizes(layer) if key in owners), None)
        if owner is None:
            owners |= dict.fromkeys(_sizes(layer), layer)
        else:
            reasons[layer.name] = f"shares its weight with {owner.name}"
    tied: dict[str, tuple[Layer, ...]] = {}
    for layer in layers:
        owner = next((owners[key] for key in _sizes(layer) if key in owners), layer)
        if owner is not layer and _is_use_of(layer, owner):
            tied[owner.name] = (*tied.get(owner.name, ()), layer)
    return tied


def _is_use_of(layer: Layer, owner: Layer) -> bool:
    """Whether uses of a layer can be written as those of another with the same parameters."""
    if layer.observed != "module" or owner.observed != "module":
        return False
    turned = (
        owner.is_linear and not owner.layout.bias and (layer.is_linear or layer.kind == "index")
    )
    return layer.layout == owner.layout or (turned and _sizes(layer) == _sizes(owner))


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
    names = [name for name, _ in unwrapped(model).named_modules()] + [x.name for x in layers]
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
