"""The gradient that hooks make of every layer is compared with autograd's before it is believed.

What a module computes cannot be told from its class. On a small batch, ∇ = Σ g̃āᵀ of the hooks and
the gradient that autograd has for the parameters are compared by their products with random
vectors on both sides,

    Uᵀ(Σ g̃āᵀ)V = Uᵀ∇V,  U [o, K], V [i, K] normal with variance 1/K,

whose squared difference is ‖E‖² in the mean where gradients differ by E. A gradient of autograd is
freed as soon as its products are known, so that at most one is held.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from isokron.curvature.backward import Passes, frozen, leaves_of, unchanged
from isokron.curvature.events import Event, by_example
from isokron.curvature.hooks import Watcher
from isokron.curvature.layers import NORMS, Layer, unwrapped
from isokron.curvature.losses import Likelihood, Loss, terms_and_weights
from isokron.curvature.selection import Selection
from isokron.linalg.precision import full_precision

VECTORS = 8  # K
NORMS_FORWARD = tuple(norm.forward for norm in NORMS)
ROUNDING = 8  # errors of a position, in units of the last place


def check_layers(
    model: nn.Module,
    batch: Any,
    loss: Loss | Likelihood,
    selection: Selection,
    *,
    strict: bool = False,
) -> Selection:
    """The selection without layers whose gradients are wrong or cannot be told apart by example.

    One forward pass over `batch` and two backward passes, of the loss of one example and of the
    others': rows of an example have no gradient of another's loss, and the gradients that hooks
    make are autograd's. Layers that the loss does not use, or that are not called as modules, are
    left out too. `.grad` of no parameter changes.

    Args:
        strict: refuse such layers in place of leaving them out.
    """
    comparison = Comparison(model, batch, loss, selection.layers)
    try:
        compared = comparison.run()
    except RuntimeError as error:
        # reentrant checkpoints go back by .backward() alone
        if "heckpoint" not in str(error):
            raise
        comparison = Comparison(model, batch, loss, selection.layers, accumulate=True)
        compared = comparison.run()
    if not compared:
        return selection
    reasons = comparison.reasons()
    if strict and reasons:
        raise ValueError(
            f"strict=True: gradients of {len(reasons)} of {len(selection.layers)} layers do not "
            f"agree with autograd: {_listed(reasons)}; leave them out by "
            f"layers='{','.join('!' + name for name in reasons)}', or pass strict=False"
        )
    checked = selection.without(reasons)
    if not checked.layers:
        raise ValueError(
            f"no layer is left of {len(reasons)} whose gradients were compared with autograd: "
            f"{_listed(reasons)}; name other layers"
        )
    agreeing = sum(comparison.agrees(layer) for layer in checked.layers)
    return replace(checked, compared=len(selection.layers), agreeing=agreeing)


def _listed(reasons: dict[str, str]) -> str:
    more = f" + {len(reasons) - 6} more" * (len(reasons) > 6)
    return ", ".join(f"{name} ({reason})" for name, reason in list(reasons.items())[:6]) + more


class Comparison(Watcher):
    """Products of the gradients of all layers, as hooks make them and as autograd does.

    accumulate: by .backward(), with `.grad` of the parameters put back afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | Likelihood,
        layers: list[Layer],
        *,
        accumulate: bool = False,
    ) -> None:
        super().__init__(layers, self._take)
        self.model, self.batch, self.loss, self.accumulate = model, batch, loss, accumulate
        self.passes = Passes(model, [batch], loss, layers)
        self.failed: dict[str, str] = {}
        self.reached: set[str] = set()
        self.rows = torch.zeros(0, dtype=torch.bool)  # [N], examples whose loss is taken
        # of each layer: products from hooks and from autograd; Σ‖g̃‖²‖ā‖²; positions; coarsest
        # precision
        self.hooked: dict[str, Tensor] = {}
        self.wanted: dict[str, Tensor] = {}
        self.size: dict[str, float] = {}
        self.places: dict[str, int] = {}
        self.eps: dict[str, float] = {}

    def run(self) -> bool:
        """Whether the batch has terms to compare by."""
        with unchanged(self.model), torch.enable_grad(), self, self._parameters() as params:
            if isinstance(self.loss, Likelihood):
                outputs, targets = self.loss.forward(self.model, self.batch)
                terms, weights = self.loss.terms(outputs, targets), self.loss.weights(targets)
            else:
                terms, weights = terms_and_weights(self.loss(self.model, self.batch))
            self.passes._count(weights, self.batch)
            if not self.passes.count:
                return False
            totals = self.passes._rows(terms * weights).sum(1)
            self.rows = torch.zeros(len(totals), dtype=torch.bool, device=totals.device)
            self.rows[int(self.passes._rows(weights).sum(1).ne(0).int().argmax())] = True
            self._back(totals[self.rows].sum(), params, again=len(totals) > 1)
            if len(totals) > 1:
                self.rows = ~self.rows
                self._back(totals[self.rows].sum(), params)
        return True

    def _back(self, total: Tensor, params: list[Tensor], again: bool = False) -> None:
        if not total.requires_grad:
            raise ValueError(
                "the loss does not depend on any of the layers observed; name in `layers` those "
                "that it uses"
            )
        if self.accumulate:
            outside = [x for x in leaves_of(total) if all(x is not param for param in params)]
            with frozen(outside):
                total.backward(retain_graph=again)
        else:
            torch.autograd.grad(total, params, retain_graph=again, allow_unused=True)

    @contextmanager
    def _parameters(self) -> Iterator[list[Tensor]]:
        """Parameters of the layers, whose gradients become products when they are complete."""
        named = dict(unwrapped(self.model).named_parameters())
        uses: dict[str, list[tuple[Layer, str]]] = {}
        for layer in self.layers:
            for key, name in layer.layout.params.items():
                uses.setdefault(name, []).append((layer, key))
        grads = {name: named[name].grad for name in uses}
        handles = []
        try:
            for name in uses:
                if self.accumulate:
                    named[name].grad = None
                handles.append(named[name].requires_grad_().register_hook(self._hook(uses[name])))
            yield [named[name] for name in uses]
        finally:
            for handle in handles:
                handle.remove()
            for name, grad in grads.items():
                named[name].requires_grad_(False)
                if self.accumulate:
                    named[name].grad = grad

    def _hook(self, uses: Sequence[tuple[Layer, str]]) -> Callable[[Tensor], Tensor | None]:
        def take(grad: Tensor) -> Tensor | None:
            layers = [layer for layer, _ in uses]
            with self.guard(layers), torch.no_grad(), full_precision():
                dense = grad.to_dense() if grad.is_sparse else grad
                for layer, key in uses:
                    self._add(self.wanted, layer, parameter_products(layer, key, dense))
                    self._note(layer, grad)
                if not grad.is_sparse:  # of no memory in its place
                    return grad.new_zeros(()).expand_as(grad)
            return None

        return take

    @contextmanager
    def guard(self, layers: Sequence[Layer]) -> Iterator[None]:
        """What does not fit a layer's type shows in errors of shapes and arguments."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            text = (str(error) or type(error).__name__).splitlines()[0].partition(";")[0]
            text = text.partition(": ")[2] if text.startswith("layer ") else text
            self.failed |= {x.name: text for x in layers if x.name not in self.failed}

    def _take(self, event: Event) -> None:
        layer = event.layer
        self.reached.add(layer.name)
        rows, examples = event.grads, self.passes.examples
        is_sequence = event.tokens is None and rows.size(2) > 1
        event = by_example(event, examples, self.passes.terms)
        largest = event.grads.abs().amax((0, 2, 3))  # [N]
        leaked = (largest != 0) & largest.isfinite()
        if examples is not None and bool(leaked[~self.rows].any()):
            # as chosen and rejected texts of DPO are joined
            if is_sequence and (many := rows.size(1) // examples) > 1:
                copies = rows.abs().amax((0, 2, 3)).view(many, examples)
                if not copies[:, ~self.rows].any():
                    raise ValueError(
                        f"is called with {many} batches as one, call the model for each"
                    )
            raise ValueError("mixes examples")
        if event.inputs.shape[:3] != event.grads.shape[:3]:
            counts = event.inputs.size(2), event.grads.size(2)
            raise ValueError("computes {1} positions where its type has {0}".format(*counts))
        products, size = event_products(event)
        self._add(self.hooked, layer, products)
        self.size[layer.name] = self.size.get(layer.name, 0.0) + size
        places = event.grads.size(1) * event.grads.size(2)
        self.places[layer.name] = self.places.get(layer.name, 0) + places
        self._note(layer, event.inputs, event.grads)

    def _add(self, sums: dict[str, Tensor], layer: Layer, products: Tensor) -> None:
        earlier = sums.get(layer.name)
        sums[layer.name] = products.double() if earlier is None else earlier + products.double()

    def _note(self, layer: Layer, *tensors: Tensor) -> None:
        """The coarsest precision in which anything of a layer was computed."""
        eps = [torch.finfo(x.dtype).eps for x in tensors if x.is_floating_point()]
        self.eps[layer.name] = max(self.eps.get(layer.name, 0.0), *eps)

    def agrees(self, layer: Layer) -> bool:
        """Whether a layer that is not left out was compared: gradients may not be finite."""
        wanted = self.wanted.get(layer.name)
        return wanted is None or bool(wanted.isfinite().all())

    def reasons(self) -> dict[str, str]:
        """Why layers are left out, by name."""
        return {x.name: reason for x in self.layers if (reason := self._reason(x))}

    def _reason(self, layer: Layer) -> str:
        name = layer.name
        if name in self.failed:
            return self.failed[name]
        if name not in self.reached:
            # an expert may have no token in this batch, and some in the next
            if layer.observed == "experts":
                return ""
            return "not used by the loss" if name in self.calls else "its module is not called"
        hooked = self.hooked[name]
        wanted = self.wanted.get(name, torch.zeros_like(hooked))
        length, error = float(wanted.norm()), float((hooked - wanted).norm())
        # rounding of every position adds up at random
        rounding = ROUNDING * self.eps[name] * self.size[name] ** 0.5
        # gradients that are not finite are named when they are used
        if not wanted.isfinite().all() or error <= self._tolerance(layer) * length + rounding:
            return ""
        text = f"its gradient is {min(error / max(length, 1e-30), 10):.0%} off autograd's"
        others = self._same_weight(layer)
        verb = "has" if len(others) == 1 else "have"
        return f"{text}: {' and '.join(others)} {verb} its weight too" if others else text

    def _tolerance(self, layer: Layer) -> float:
        """Relative difference of gradients that are the same."""
        eps, places = self.eps[layer.name], self.places[layer.name]
        if eps < 1e-5:
            return 1e-3
        # torch's backward passes of norms and embeddings on the CPU add up in half precision, one
        # position after the other: of 2,048 in bfloat16, 60 % of a norm's sum may be lost
        if type(layer.module).forward in NORMS_FORWARD:
            return 1e-2 + eps * places / 8
        return 1e-2 + (eps * places**0.5 if layer.kind == "index" else 0.0)

    def _same_weight(self, layer: Layer) -> list[str]:
        """Modules whose uses of the layer's weight are not observed."""
        model = unwrapped(self.model)
        named = list(model.named_parameters(remove_duplicate=False))
        shared = [dict(named)[name] for name in list(layer.layout.params.values())[:1]]
        modules = {x.name for x in (layer, *layer.tied)}
        places = {n.rpartition(".")[0] for n, param in named if any(param is x for x in shared)}
        return sorted(places - modules) if layer.observed == "module" else []


def random_vectors(layer: Layer, like: Tensor) -> tuple[Tensor, Tensor]:
    """U [o, K] and V [i, K] of a layer, made anew at every use: to hold all would take memory."""
    _, outputs, inputs = layer.shape
    generator = torch.Generator().manual_seed(crc32(layer.name.encode()))
    sides = (torch.randn(n, VECTORS, generator=generator) for n in (outputs, inputs))
    left, right = (side.to(like) / VECTORS**0.5 for side in sides)
    return left, right


def event_products(event: Event) -> tuple[Tensor, float]:
    """Uᵀ(Σ g̃āᵀ)V of every block [B, K, K], and Σ‖g̃‖²‖ā‖². Of a diagonal: by row [1, rows, K]."""
    layer, x = event.layer, event.inputs.flatten(1, 2)
    grads = event.grads.flatten(1, 2)
    grads = grads.to(torch.promote_types(grads.dtype, torch.float32))
    left, right = random_vectors(layer, grads)
    if layer.kind == "diagonal":
        parts = {"weight": grads[0] * x[0], "bias": grads[0]}
        rows = torch.stack([parts[key] for key in layer.layout.params])  # [rows, P, d]
        return rows.sum(1)[None] @ right, float(rows.square().sum())
    squares = grads.square().sum(2)
    if layer.kind == "index":
        columns = x[0]
        inputs = right[columns.clamp_min(0)] * (columns >= 0)[:, None]
        return (grads @ left).mT @ inputs, float(squares.sum())
    x = x.to(grads.dtype)
    bias = layer.layout.bias
    inputs = x @ right[: x.size(2)] + (right[-1] if bias else 0)
    size = squares * (x.square().sum(2) + bias)
    return (grads @ left).mT @ inputs, float(size.sum())


def parameter_products(layer: Layer, key: str, grad: Tensor) -> Tensor:
    """Uᵀ∇V, as `event_products` has them, of the gradient of a weight or a bias alone."""
    layout = layer.layout
    part = layout.part(key, grad).reshape(layout.shapes[key])
    part = part.to(torch.promote_types(grad.dtype, torch.float32))
    left, right = random_vectors(layer, part)
    if layer.kind == "diagonal":
        rows = [
            part.flatten() if name == key else torch.zeros_like(part).flatten()
            for name in layout.params
        ]
        return torch.stack(rows)[None] @ right
    blocks, outputs, _ = layer.shape
    if key == "bias":
        return left.mT @ (part.reshape(blocks, outputs, 1) * right[-1])
    matrix = part.mT[None] if layout.transposed else part.reshape(blocks, outputs, -1)
    return left.mT @ (matrix @ right[: matrix.size(2)])
