"""Hooks that observe the inputs of layers and the gradients of their outputs."""

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from isokron.curvature.events import Event, as_use_of, expert_events, inputs_of, outputs_of
from isokron.curvature.layers import PARTS, Layer
from isokron.curvature.selection import find_layers
from isokron.linalg.precision import full_precision

Sink = Callable[[Event], None]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@contextmanager
def capture(
    model: nn.Module, layers: Iterable[str] | str | None = None, *, sink: Sink | None = None
) -> Iterator[list[Event]]:
    """Observe the layers that `layers` names, or all of known types, within a context.

    The context is a list that fills in backward passes, or stays empty where a `sink` takes events.
    A weight that is used several times has one event a use. Patterns are those of `find_layers`;
    of layers that share a weight, the first is observed. Nothing is written onto modules, and
    backward passes after the context has ended are not observed.
    """
    selection = find_layers(model, "*" if layers is None else layers, max_side=None)
    events: list[Event] = []
    with Watcher(selection.layers, events.append if sink is None else sink):
        yield events


class Watcher:
    """Hooks on modules, within a context.

    `calls`: uses of each layer, with a graph or without one: reentrant checkpointing first computes
    without, and gradients come later. `products`: inputs, outputs and versions of both for every
    use of a linear layer, where a list is set.
    """

    def __init__(self, layers: list[Layer], sink: Sink) -> None:
        self.layers, self.sink = layers, sink
        self.calls: dict[str, int] = {}
        self.sources = WeakIdKeyDictionary()  # of the outputs of layers
        self.products: list[tuple[Layer, Tensor, Tensor, tuple[int, int]]] | None = None
        self.handles: list[Any] = []
        self.owners: dict[Layer, Layer] = {}  # which layer a use of a shared weight belongs to
        self.on = False
        self.contexts = ExitStack()

    def __enter__(self) -> "Watcher":
        self.register()
        self.contexts.enter_context(FAST_PATH_OFF)
        # importing torch._dynamo takes seconds; nothing is compiled where nobody has
        if "torch._dynamo" in sys.modules:
            self.contexts.enter_context(COMPILED_OFF)
        return self

    def register(self) -> None:
        """Put the hooks on, one module at a time."""
        self.on = True
        by_module: dict[tuple[nn.Module, str], list[Layer]] = {}
        for owner in self.layers:
            for layer in (owner, *owner.tied):
                by_module.setdefault((layer.module, layer.observed), []).append(layer)
                self.owners[layer] = owner
        for (module, observed), layers in by_module.items():
            hook = Hook(self, layers)
            if observed == "product":
                self.handles.append(module.register_forward_pre_hook(hook.enter))
                # first, so that nested watchers leave in the reverse of the order they entered in
                after = module.register_forward_hook(hook.leave, prepend=True, always_call=True)
                self.handles.append(after)
            else:
                self.handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def observes(self, module: nn.Module) -> bool:
        """Whether this call of a module is observed."""
        return True

    def guard(self, layers: Sequence[Layer]) -> AbstractContextManager[Any]:
        """Around what hooks do for these layers."""
        return nullcontext()

    def __exit__(self, *error: Any) -> None:
        self.on = False
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.contexts.close()

    def module_called(self, layer: Layer, inputs: Tensor, outputs: Tensor) -> None:
        self.watch(layer, inputs, outputs)
        owner = self.owners[layer]
        if self.products is not None and layer.is_linear and layer.layout == owner.layout:
            versions = inputs._version, outputs._version
            self.products.append((owner, inputs.detach(), outputs.detach(), versions))

    def experts_called(self, layers: list[Layer], args: Args, outputs: Tensor) -> None:
        x, index, weights = args
        self._await(layers, x, outputs, functools.partial(expert_events, layers, x, index, weights))

    def watch(
        self,
        layer: Layer,
        inputs: Tensor,
        outputs: Tensor,
        part: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Report this use of a layer when the gradient of its outputs is known.

        part: makes the layer's outputs [N, ...] of `outputs`, where these are laid out otherwise
            or belong to several layers.
        """
        x, owner = inputs.detach(), self.owners[layer]
        source = self.sources.get(inputs, (x.untyped_storage()._cdata, int(x.storage_offset())))

        def events(grad: Tensor) -> Iterator[Event]:
            grad = grad if part is None else part(grad)
            grads = outputs_of(layer, grad)
            # of a bias, inputs are not looked at
            inputs = inputs_of(layer, x) if layer.has_weight else grads
            event = Event(layer, inputs, grads, vector=grad.ndim == 2, source=source)
            yield event if layer is owner else as_use_of(owner, event)

        self._await([owner], inputs, outputs, events)
        self.sources[outputs] = source

    def _await(
        self,
        layers: list[Layer],
        inputs: Tensor,
        outputs: Tensor,
        events: Callable[[Tensor], Iterator[Event]],
    ) -> None:
        for layer in layers:
            self.calls[layer.name] = self.calls.get(layer.name, 0) + 1
        if not torch.is_grad_enabled():
            return
        if not outputs.requires_grad:
            # all parameters before it are frozen, but what comes after needs its gradient
            Begin.apply(outputs, torch.empty(0, device=outputs.device, requires_grad=True))
        # shares memory and version with the input, and no graph
        x, version = inputs.detach(), inputs._version

        def report(grad: Tensor) -> None:
            if not self.on:
                return
            with self.guard(layers), torch.no_grad(), full_precision():
                if x._version != version:
                    raise RuntimeError(
                        f"the input of {layers[0].name!r} was changed in place after the layer "
                        "used it, and is not known any more; make that operation out of place"
                    )
                for event in events(grad.detach()):
                    self.sink(event)

        # on the tensor: a backward hook of a module would wrap what it returns
        outputs.register_hook(report)


class Hook:
    """Forward hooks of one module. Copies, pickled ones too, do nothing: a copy of a model has
    parameters of its own."""

    def __init__(self, watcher: Watcher | None = None, layers: Sequence[Layer] = ()) -> None:
        self.watcher, self.layers = watcher, list(layers)

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, outputs: Tensor) -> None:
        if self.watcher is None or not self.watcher.observes(module):
            return
        arguments = (*args, *kwargs.values())
        with self.watcher.guard(self.layers):
            if self.layers[0].observed == "experts":
                self.watcher.experts_called(self.layers, arguments, outputs)
            else:
                self.watcher.module_called(self.layers[0], arguments[0], outputs)

    def enter(self, module: nn.Module, args: Args) -> None:
        """Observe the products that attention or a router makes, and no others."""
        if self.watcher is not None and self.watcher.observes(module):
            Projections(self.watcher, self.layers).__enter__()

    def leave(self, module: nn.Module, args: Args, outputs: Any) -> None:
        # of this thread, where others may be in the same module
        for projections in ACTIVE.stack[::-1]:
            if projections.watcher is self.watcher and projections.module is module:
                projections.__exit__()
                return

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class Begin(torch.autograd.Function):
    """The begin of a graph. Unlike a leaf, what comes out of it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, learned: Tensor) -> Tensor:
        ctx.mark_dirty(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class Everywhere:
    """A change of the process, for all threads, undone when the last that needs it leaves."""

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self.change, self.lock, self.users = change, threading.Lock(), 0
        self.contexts = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.users:
                self.contexts.enter_context(self.change())
            self.users += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                self.contexts.close()


@contextmanager
def _without_fast_path() -> Iterator[None]:
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    yield
    mha.set_fastpath_enabled(before)


@contextmanager
def _linear_observed() -> Iterator[None]:
    plain = functional.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = plain(input, weight, bias)
        for projections in ACTIVE.stack:
            projections.called(input, weight, outputs)
        return outputs

    functional.linear = linear
    yield
    if functional.linear is linear:  # or what another library has put around it stays
        functional.linear = plain


class Active(threading.local):
    """The attention modules and routers that this thread is in."""

    def __init__(self) -> None:
        self.stack: list[Projections] = []


# modules call their parts one by one: no fast path of attention, no compiled graph
FAST_PATH_OFF = Everywhere(_without_fast_path)
COMPILED_OFF = Everywhere(lambda: torch.compiler.set_stance("force_eager"))
LINEAR_OBSERVED = Everywhere(_linear_observed)
ACTIVE = Active()


class Projections:
    """Products torch.nn.functional.linear(·, weight) within one attention module or router.

    That function is observed within the context, in this thread. Inside nn.MultiheadAttention,
    inputs are [positions, examples, d], and those of the output projection [positions · examples,
    d].
    """

    def __init__(self, watcher: "Watcher", layers: list[Layer]) -> None:
        self.watcher, self.module = watcher, layers[0].module
        self.layers = {layer.name.rpartition(".")[2]: layer for layer in layers}
        self.examples = 0

    def __enter__(self) -> None:
        LINEAR_OBSERVED.__enter__()
        ACTIVE.stack.append(self)

    def __exit__(self, *error: Any) -> None:
        ACTIVE.stack.remove(self)
        LINEAR_OBSERVED.__exit__()

    def called(self, inputs: Tensor, weight: Tensor, outputs: Tensor) -> None:
        module = self.module
        if not isinstance(module, nn.MultiheadAttention):
            if weight is module.weight:
                self.watcher.watch(next(iter(self.layers.values())), inputs, outputs)
            return
        parts = _projections(module, weight)
        # the output projection sees one dimension for both, and cannot tell examples apart
        if parts and parts != ("out_proj",):
            self.examples = inputs.size(1)
        count, width = self.examples, len(weight) // max(1, len(parts))
        for i, part in enumerate(parts):
            if part in self.layers:
                rows = functools.partial(_examples_first, count=count, first=i * width, width=width)
                self.watcher.watch(self.layers[part], _examples_first(inputs, count), outputs, rows)


def _examples_first(x: Tensor, count: int, first: int = 0, width: int | None = None) -> Tensor:
    """[S, N, d] or [S · N, d] → [N, S, d], of `width` columns from `first` on."""
    x = x if x.ndim == 3 else x.unflatten(0, (-1, count))
    return x[..., first : None if width is None else first + width].transpose(0, 1)


def _projections(module: nn.MultiheadAttention, weight: Tensor) -> tuple[str, ...]:
    """Which of a module's projections this weight has, one after the other."""
    if weight is module.out_proj.weight:
        return ("out_proj",)
    packed = module.in_proj_weight
    if packed is None:
        return tuple(p for p in PARTS if weight is getattr(module, f"{p}_proj_weight"))
    if weight is not packed and weight._base is not packed:
        return ()
    row = (weight.storage_offset() - packed.storage_offset()) // packed.stride(0)
    return PARTS[row // module.embed_dim :][: len(weight) // module.embed_dim]
