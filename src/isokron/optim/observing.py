"""Statistics of layers, gathered from the user's own forward and backward passes."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature.hooks import Event, Projections, Watcher
from isokron.curvature.layers import Layer as Site
from isokron.curvature.layers import find_layers
from isokron.curvature.statistics import (
    Sums,
    covariances_,
    diagonal_,
    eigenvalues_,
    joined,
    mirrored,
)
from isokron.optim.rows import Keeps, Rows

Bases = tuple[Tensor | None, Tensor | None]


def choose_sites(model: nn.Module, layers: Iterable[str] | str | None) -> list[Site]:
    """The layers named, or all with dense inputs; none whose parameters another layer has too."""
    # routers and experts are not called as modules; they go to AdamW, as unknown types do
    patterns = "*" if layers is None else layers
    sites = [
        layer
        for layer in find_layers(model, patterns, max_side=None).layers
        if layer.observed == "module" or isinstance(layer.module, nn.MultiheadAttention)
    ]
    if layers is None:
        sites = [site for site in sites if site.kind == "dense"]
    names: dict[Tensor, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, set()).add(name)
    tied = {name for several in names.values() if len(several) > 1 for name in several}
    sites = [site for site in sites if not tied & set(site.layout.params.values())]
    if not sites:
        raise ValueError(
            f"no layer to precondition in {type(model).__name__} with layers={layers!r}: linear "
            "layers, convolutions and attention are by default, embeddings and norms when they are "
            "named, weights that are tied never; use AdamW, or name layers"
        )
    return sites


class Recorder(Watcher):
    """Sums over all that was seen since the last step: Σāāᵀ, Σĝĝᵀ and, in known bases, EK-FAC's Λ.

    ĝ are gradients as they come: what they are to be multiplied with is known when all passes of a
    step are. `bases`: of layers whose Λ is asked for; `keeps`: which vectors of a layer stay what
    they are and are not summed up. The optimizer owns this and not the reverse, so that its hooks
    go when it goes.
    """

    def __init__(self, sites: list[Site]) -> None:
        super().__init__(sites, self._take)
        self.bases: dict[str, Bases] = {}
        self.keeps: dict[str, Keeps] = {}
        self.sums: dict[str, Rows] = {}
        self.terms: dict[str, int] = {}
        self.waiting: dict[str, list[tuple[int, Event]]] = {}  # with the backward pass they are of
        self.over = False  # whether what was seen is for a step that may have been left out

    def __enter__(self) -> "Recorder":
        """Hook all layers."""
        self.on = True
        attention: dict[nn.Module, list[Site]] = {}
        for site in self.layers:
            if isinstance(site.module, nn.MultiheadAttention):
                attention.setdefault(site.module, []).append(site)
            else:
                hook = site.module.register_forward_hook(Hook(self, site), with_kwargs=True)
                self.handles.append(hook)
        for module, sites in attention.items():
            inside = Inside(self, sites)
            self.handles.append(module.register_forward_pre_hook(inside.enter))
            self.handles.append(module.register_forward_hook(inside.leave, always_call=True))
        return self

    def forget(self) -> None:
        """Drop what was seen, as gradients are dropped. Passes under way are still counted."""
        self.sums.clear()
        self.terms.clear()
        self.waiting.clear()
        self.over = False

    def seen(self) -> bool:
        """Whether there was any pass since the last step."""
        return bool(self.sums or self.waiting)

    def take(self) -> tuple[dict[str, Rows], dict[str, int]]:
        """The sums of all passes since the last step, layer by layer, and how many terms each has.

        A term of the loss is an example. From here on nothing has been seen.
        """
        for name in list(self.waiting):  # uses whose gradient never came, and those beside them
            self._fold(name)
        self.calls.clear()
        names = [site.name for site in self.layers if site.name in self.sums]
        found = (
            {name: self.sums[name] for name in names},
            {name: self.terms[name] for name in names},
        )
        self.forget()
        return found

    def _take(self, event: Event) -> None:
        if self.over:
            self.forget()
        name = event.layer.name
        backward = torch._C._current_graph_task_id()
        self.waiting.setdefault(name, []).append((backward, event))
        if len(self.waiting[name]) >= self.calls.get(name, 0):
            self._fold(name)
            self.calls[name] = 0

    def _fold(self, name: str) -> None:
        """Uses by as many examples in one pass are positions of these; others are apart."""
        alike: dict[tuple[int, int], list[Event]] = {}
        for backward, event in self.waiting.pop(name):
            alike.setdefault((backward, event.grads.size(1)), []).append(event)
        sums = self.sums.setdefault(name, Rows(self.keeps.get(name, _none)))
        for events in alike.values():
            site = events[0].layer
            dtype = next(site.module.parameters()).dtype
            uses = joined(events, torch.promote_types(dtype, torch.float32), None)
            self.terms[name] = self.terms.get(name, 0) + uses.grads.size(1)
            if uses.kind == "diagonal":
                diagonal_(sums, uses, list(site.layout.params))
                continue
            covariances_(sums, uses, site.columns)
            if name in self.bases:
                eigenvalues_(sums, uses, self.bases[name], site.columns)


def factor(reduction: str, terms: int, total: int, ranks: int = 1) -> float:
    """What makes g̃ of ĝ, n terms being here and N on all R ranks, whose gradients are averaged.

    "mean": n, of a loss Σℓ/n; "global_mean": N/R, of a loss ΣℓR/N; "sum": 1, of a loss Σℓ.
    """
    return {"mean": float(terms), "global_mean": total / ranks, "sum": 1.0}[reduction]


def means(
    sums: Sums | dict[str, Tensor], terms: int, places: float | None, weight: float
) -> dict[str, Tensor]:
    """A = Σāāᵀ / `places`, G = weight·Σĝĝᵀ and Λ like G, and the counts they are of."""
    found = mirrored(Sums(sums))
    if "columns" in found:
        found["eigenvalues"] = found.pop("columns").mT.contiguous()
    thin = found.pop("columns.output", None)
    count = torch.tensor(float(terms), dtype=torch.float64)
    used = count if places is None else torch.tensor(float(places), dtype=torch.float64)
    for key, value in found.items():
        found[key] = value / float(used) if key == "input" else value * weight
    return {**found, **({} if thin is None else {"columns": thin}), "terms": count, "places": used}


def layer_sums(seen: Mapping[str, Mapping[str, Tensor]]) -> list[Tensor]:
    """A sum for all that each layer has shown: no NaN or infinity leaves it finite. []"""
    return [
        torch.stack([value.sum().double() for value in means.values() if value.ndim]).sum()
        for means in seen.values()
    ]


def check_seen(
    layers: Iterable[str], sums: Iterable[Sequence[float]], nonfinite: str
) -> str | None:
    """Raise for sums that are not finite, or say why to skip this step; None: step."""
    if nonfinite == "ignore":
        return None
    for name, values in zip(layers, sums, strict=True):
        if all(map(isfinite, values)):
            continue
        wrong = f"inputs or gradients of outputs of layer {name!r} are not finite"
        if nonfinite == "raise":
            raise FloatingPointError(
                f"NaturalGradient: {wrong}; nothing was changed. Look for what overflows, or pass "
                'nonfinite="skip"'
            )
        return wrong
    return None


def _none(side: str, width: int, count: int) -> bool:
    return False


class Hook:
    """A forward hook that counts passes of training. Copies of it, pickled ones too, do nothing:
    a copy of a model has parameters of its own."""

    def __init__(self, recorder: Recorder | None = None, site: Site | None = None) -> None:
        self.recorder, self.site = recorder, site

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if self.recorder is None or self.site is None:
            return
        if _learning(module) and torch.is_grad_enabled():
            seen = args[0] if args else next(iter(kwargs.values()))
            self.recorder.watch(self.site, seen, out)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class Inside:
    """Hooks around nn.MultiheadAttention, which see the products it makes, and no others."""

    def __init__(self, recorder: Recorder | None = None, sites: Sequence[Site] = ()) -> None:
        self.recorder, self.sites, self.lasting = recorder, list(sites), ExitStack()

    def enter(self, module: nn.Module, args: Any) -> None:
        if self.recorder is not None and _learning(module):
            self.lasting.enter_context(Projections(self.recorder, self.sites))

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self.lasting.close()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def _learning(module: nn.Module) -> bool:
    """In training, and not frozen: watching a frozen layer costs a backward pass through it."""
    return module.training and any(param.requires_grad for param in module.parameters())
