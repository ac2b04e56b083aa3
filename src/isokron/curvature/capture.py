"""Inputs of layers and gradients of their outputs, seen as a forward and a backward pass go by."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn import functional

from isokron.curvature.sites import PARTS, Site, find_sites


@dataclass(frozen=True, eq=False)
class Event:
    """One use of a weight. `inputs`: [B, N, S, i], or numbers of columns [B, N, S]; `grads`: of its
    outputs, [B, N, S, o]. See isokron.curvature.views."""

    site: Site
    inputs: Tensor
    grads: Tensor


Sink = Callable[[Event], None]


def capture(
    model: nn.Module,
    layers: Iterable[str] | str | None = None,
    *,
    sink: Sink | None = None,
    strict: bool = False,
    batch_dim: int = 0,
) -> AbstractContextManager[list[Event]]:
    """Observe every layer whose name matches `layers`, or all of known types, while it lasts.

    Gives a list that fills as backward passes go by, or stays empty where a `sink` takes events.
    A weight that is used several times has one event a use. `batch_dim`: which dimension of inputs
    counts examples, past which all but the last are positions. `strict`: a layer of unknown type is
    an error, and not a warning. Nothing is written onto modules, and nothing is seen any more when
    the context has ended: the backward pass belongs inside.
    """
    events: list[Event] = []
    take = events.append if sink is None else sink
    return _watched(Watcher(find_sites(model, layers, strict), take, batch_dim), events)


@contextmanager
def _watched(watcher: "Watcher", events: list[Event]) -> Iterator[list[Event]]:
    with watcher:
        yield events


class Watcher:
    """Hooks on the modules of sites. `calls`: how often each was used, with a graph or without one,
    for a gradient may come later to what reentrant checkpointing first computes without."""

    def __init__(self, sites: list[Site], sink: Sink, batch_dim: int = 0) -> None:
        self.sites, self.sink, self.batch_dim = sites, sink, batch_dim
        self.calls: dict[str, int] = {}
        self.handles: list[Any] = []
        self.on = False
        self.projections = ExitStack()

    def __enter__(self) -> "Watcher":
        attention = [s for s in self.sites if isinstance(s.module, nn.MultiheadAttention)]
        self.on = True
        try:
            for site in self.sites:
                if site not in attention:
                    hook = self._hook(site)
                    self.handles.append(site.module.register_forward_hook(hook, with_kwargs=True))
            self.projections.enter_context(_no_shortcuts())
            if attention:
                self.projections.enter_context(Projections(self, attention))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.on = False
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.projections.close()

    def _hook(self, site: Site) -> Callable[..., None]:
        def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            self.watch(site, args[0] if args else next(iter(kwargs.values())), out)

        return seen

    def watch(
        self,
        site: Site,
        inputs: Tensor,
        outputs: Tensor,
        batch_dim: int | None = None,
        part: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Report this use of a site when the gradient of its outputs is known.

        `part`: which part of that gradient is the site's own.
        """
        self.calls[site.name] = self.calls.get(site.name, 0) + 1
        if not torch.is_grad_enabled():
            return
        if not outputs.requires_grad:
            # all before it is frozen, but what comes after needs its gradient
            Begin.apply(outputs, torch.empty(0, requires_grad=True))
        dim = self.batch_dim if batch_dim is None else batch_dim
        seen, version = inputs.detach(), inputs._version

        def report(grad: Tensor) -> None:
            if not self.on:
                return
            if seen._version != version:
                raise RuntimeError(
                    f"the input of {site.name!r} was changed in place after the layer used it, and "
                    "is not known any more; make that operation out of place"
                )
            own = grad.detach() if part is None else part(grad.detach())
            with torch.no_grad(), without_autocast(grad.device.type):
                self.sink(Event(site, site.view.inputs(seen, dim), site.view.outputs(own, dim)))

        outputs.register_hook(report)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Statistics are no part of what the user has put under autocast, which some devices lack."""
    active = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


class Begin(torch.autograd.Function):
    """Where a graph begins. Unlike a leaf, what comes out of it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, learned: Tensor) -> Tensor:
        ctx.mark_dirty(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def _no_shortcuts() -> Iterator[None]:
    """Attention, and the layers of transformers, call their parts one by one."""
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


class Projections:
    """Products within nn.MultiheadAttention, which no module of their own makes.

    While it lasts, torch.nn.functional.linear tells of those with the weights of these sites.
    Inside, inputs are [positions, examples, d], and those of the output projection
    [positions · examples, d].
    """

    def __init__(self, watcher: "Watcher", sites: list[Site]) -> None:
        self.watcher = watcher
        self.sites: dict[nn.MultiheadAttention, dict[str, Site]] = {}
        for site in sites:
            assert isinstance(site.module, nn.MultiheadAttention)
            self.sites.setdefault(site.module, {})[site.name.rpartition(".")[2]] = site
        self.examples: dict[nn.MultiheadAttention, int] = {}

    def __enter__(self) -> None:
        self.linear = plain = functional.linear

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            out = plain(input, weight, bias)
            self._seen(input, weight, out)
            return out

        functional.linear = linear

    def __exit__(self, *error: Any) -> None:
        functional.linear = self.linear

    def _seen(self, inputs: Tensor, weight: Tensor, out: Tensor) -> None:
        for module, sites in self.sites.items():
            if weight is module.out_proj.weight:
                if "out_proj" not in sites:
                    return
                count = self.examples[module]

                def parted(x: Tensor, count: int = count) -> Tensor:
                    return x.unflatten(0, (-1, count)).movedim(1, 0)

                self.watcher.watch(sites["out_proj"], parted(inputs), out, 0, parted)
                return
            for first, part in enumerate(PARTS):
                rows = _rows(module, part, weight)
                if rows:
                    self.examples[module] = inputs.size(1)
                    for i in range(rows // module.embed_dim):
                        site = sites.get(PARTS[first + i])
                        where = slice(i * module.embed_dim, (i + 1) * module.embed_dim)
                        own = functools.partial(_columns, where=where)
                        if site is not None:
                            self.watcher.watch(site, inputs, out, 1, own)
                    return


def _columns(grad: Tensor, where: slice) -> Tensor:
    return grad[..., where]


def _rows(module: nn.MultiheadAttention, part: str, weight: Tensor) -> int | None:
    """How many rows of a module's projections this weight has, if its first are those of `part`."""
    packed = module.in_proj_weight
    if packed is None:
        return len(weight) if weight is getattr(module, f"{part}_proj_weight") else None
    start = PARTS.index(part) * module.embed_dim
    same = weight is packed or weight._base is packed
    offset = weight.storage_offset() - packed.storage_offset()
    return len(weight) if same and offset == start * packed.stride(0) else None
