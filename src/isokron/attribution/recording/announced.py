"""One batch of a training under way: its rows, as the gradients of its layers come by."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.encoding import Encoding
from isokron.curvature.capture import Event, Projections, Watcher
from isokron.curvature.sites import Site
from isokron.curvature.statistics import joined


class Announced:
    """The examples `numbers`, in their order. `factors`: by layer, what brings gradients of the
    loss back to those of the sum of the examples' losses, and weighs them."""

    def __init__(self, encoding: Encoding, numbers: Tensor, factors: Mapping[str, float]) -> None:
        self.encoding, self.numbers, self.factors = encoding, numbers, factors
        sites = [encoder.site for encoder in encoding.encoders.values()]
        self.watcher = Watcher(sites, self._take)
        self.watcher.on = True
        self.waiting: dict[str, list[Event]] = {}
        self.rows: Tensor | None = None
        self.offsets: dict[str, int] = {}
        start = 0
        for name, encoder in encoding.encoders.items():
            self.offsets[name] = start
            start += encoder.size

    @torch.no_grad()
    def finished(self) -> Tensor | None:
        """Rows [n, D] of all that came, and no more is taken; None if nothing did."""
        for name in list(self.waiting):  # some uses were computed twice, or led nowhere
            self._fold(name)
        self.watcher.on = False
        return self.rows

    def _take(self, event: Event) -> None:
        name = event.site.name
        self.waiting.setdefault(name, []).append(event)
        if len(self.waiting[name]) >= self.watcher.calls[name]:
            self._fold(name)

    def _fold(self, name: str) -> None:
        uses = joined(self.waiting.pop(name), torch.float32, None)
        encoder = self.encoding.encoders[name]
        own = encoder.rows(uses) * self.factors[name]
        if len(own) != len(self.numbers):
            raise ValueError(
                f"layer {name!r} saw {len(own)} examples, and {len(self.numbers)} were announced; "
                "keep examples apart in the first dimension of its inputs, or leave it out"
            )
        if self.rows is None:
            self.rows = own.new_zeros(len(own), self.encoding.width)
        if self.encoding.flat:
            self.encoding.place_(self.rows, name, own)
        else:  # several passes back through one batch add up
            start = self.offsets[name]
            self.rows[:, start : start + encoder.size] += own


Current = Callable[[nn.Module], Announced | None]


class Seen:
    """A forward hook. Copies of it, pickled ones too, do nothing, for a copied model is another."""

    def __init__(self, current: Current | None = None, site: Site | None = None) -> None:
        self.current, self.site = current, site

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        batch = None if self.current is None else self.current(module)
        if batch is not None and self.site is not None:
            inputs = args[0] if args else next(iter(kwargs.values()))
            batch.watcher.watch(self.site, inputs, out)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class Inside:
    """Hooks around nn.MultiheadAttention, which see the products it makes, and no others."""

    def __init__(self, current: Current | None = None, sites: Sequence[Site] = ()) -> None:
        self.current, self.sites, self.lasting = current, list(sites), ExitStack()

    def enter(self, module: nn.Module, args: Any) -> None:
        batch = None if self.current is None else self.current(module)
        if batch is not None:
            self.lasting.enter_context(Projections(batch.watcher, self.sites))

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self.lasting.close()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
