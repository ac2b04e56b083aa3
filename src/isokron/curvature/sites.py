"""Which weights of a model are observed, and under what names."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from isokron.curvature.packing import Layout
from isokron.curvature.views import Linear, View, view_of

PARTS = ("q", "k", "v")  # of the packed projection of nn.MultiheadAttention


@dataclass(frozen=True, eq=False)
class Site:
    """A weight, with its bias, seen as a matrix."""

    name: str
    module: nn.Module
    view: View
    layout: Layout

    @property
    def columns(self) -> int:
        """Of W, where inputs are numbers of columns; else 0."""
        return self.layout.shape[2] if self.view.kind == "index" else 0


def find_sites(
    model: nn.Module, layers: Iterable[str] | str | None = None, strict: bool = False
) -> list[Site]:
    """All layers of known types, or those whose names match one of the patterns `layers`.

    Every module is a site of its own. A parameter that several share has the first of its names at
    all of them, as in model.named_parameters().
    """
    patterns = [layers] if isinstance(layers, str) else None if layers is None else list(layers)
    sites: list[Site] = []
    unknown: list[str] = []
    inside: set[nn.Module] = set()  # of a module that is seen as a whole
    names = {param: name for name, param in model.named_parameters()}
    known: list[str] = []
    for name, module in model.named_modules():
        known.append(name)
        if isinstance(module, nn.MultiheadAttention):
            parts = _attention(name, module, names)
            known += [site.name for site in parts]
            inside |= set(module.modules())
            whole = _wanted(name, patterns)
            sites += [site for site in parts if whole or _wanted(site.name, patterns)]
            if whole and module.bias_k is not None:
                unknown.append(f"bias_k and bias_v of {name or 'the model itself'}")
            continue
        if module in inside or not _wanted(name, patterns):
            continue
        own = dict(module.named_parameters(recurse=False))
        view = view_of(module) if own else None
        if view is not None:
            named = {key: names[param] for key, param in own.items()}
            shapes = {key: tuple(param.shape) for key, param in own.items()}
            layout = Layout(view.form, named, shapes, view.groups)
            sites.append(Site(name, module, view, layout))
        elif own:
            unknown.append(f"{name or 'the model itself'} ({type(module).__name__})")
    if patterns is not None:
        _check_patterns(patterns, known)
    if unknown:
        problem = (
            f"curvature of {', '.join(unknown)} is not known; name the layers you want in `layers`"
        )
        if strict:
            raise ValueError(f"{problem}, or leave strict=False to skip these")
        warnings.warn(f"{problem} to be rid of this warning; skipped", stacklevel=3)
    if not sites:
        raise ValueError(
            f"no layer to observe in {type(model).__name__} with layers={layers!r}; known are "
            "Linear, Conv1d to Conv3d, Embedding, MultiheadAttention, LayerNorm, GroupNorm, "
            "RMSNorm and transformers' Conv1D"
        )
    return sites


def _attention(
    name: str, module: nn.MultiheadAttention, names: Mapping[nn.Parameter, str]
) -> list[Site]:
    """Query, key and value by themselves, packed or not, and the projection of the output."""
    size = module.embed_dim
    packed = module.in_proj_weight is not None
    sites = []
    for i, part in enumerate(PARTS):
        rows = (i * size, (i + 1) * size)
        key = "in_proj_weight" if packed else f"{part}_proj_weight"
        params = {"weight": names[getattr(module, key)]}
        shapes: dict[str, tuple[int, ...]] = {"weight": (size, getattr(module, key).size(1))}
        cut = {"weight": rows} if packed else {}
        if module.in_proj_bias is not None:
            params["bias"], shapes["bias"] = names[module.in_proj_bias], (size,)
            cut["bias"] = rows
        layout = Layout("rows", params, shapes, rows=cut)
        sites.append(Site(_joined(name, part), module, Linear(), layout))
    own = dict(module.out_proj.named_parameters())
    params = {key: names[param] for key, param in own.items()}
    layout = Layout("rows", params, {key: tuple(value.shape) for key, value in own.items()})
    return [*sites, Site(_joined(name, "out_proj"), module, Linear(), layout)]


def _wanted(name: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"layers: {pattern!r} matches no module; there are {', '.join(names[1:6])}, …"
            )


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
