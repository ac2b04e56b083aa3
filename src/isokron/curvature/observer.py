"""Statistics of layers from the passes that a training loop makes anyway."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isokron.curvature.backward import hessian_roots, sampled_slopes, warn_of_passes
from isokron.curvature.events import Event
from isokron.curvature.fit import Fold
from isokron.curvature.hooks import Watcher
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood
from isokron.curvature.statistics import Sums, eigenvalues_, joined

Bases = tuple[Tensor | None, Tensor | None]


class Observer(Watcher):
    """Sums over all passes of one step: Σāāᵀ, Σĝĝᵀ and, in known bases, EK-FAC's Λ.

    With fisher="empirical", ĝ are the gradients of the user's own backward passes: what makes g̃ of
    them is known when all passes of a step are. Otherwise `observe` makes passes of its own.

    Args:
        layers: those to observe, in training mode and while they are not frozen.
        method: as of `curvature.fit`.
        fisher: as of `curvature.fit`.
        make_sums: the sums of a layer, by its name, made anew for every step.
    """

    def __init__(
        self, layers: list[Layer], method: str, fisher: str, make_sums: Callable[[str], Sums]
    ) -> None:
        super().__init__(layers, self._take)
        self.fisher, self.make_sums = fisher, make_sums
        self.bases: dict[str, Bases] = {}  # of layers whose Λ is asked for
        self.fold = Fold({layer.name: method for layer in layers}, fisher, "expand", {})
        self.edges: list[GradientEdge] = []  # outputs of layers, which `observe` goes back to
        self.warned = False
        self.forget()

    def forget(self) -> None:
        """Drop what was observed, as gradients are dropped. Passes under way still count."""
        self.fold.waiting.clear()
        self.fold.masks.clear()
        self.fold.sums = {layer.name: self.make_sums(layer.name) for layer in self.layers}
        self.terms: dict[str, float] = {}
        self.reached: set[str] = set()  # layers that `observe` has come to
        self.waiting: dict[str, list[tuple[int, Event]]] = {}  # with the number of their pass
        self.observing = self.fisher == "empirical"
        self.weighted: Tensor | None = None  # [N], which examples of `observe` have a term
        self.stale = False  # whether a GradScaler has ended the step that this was for

    def observes(self, module: nn.Module) -> bool:
        # watching a frozen layer would cost a backward pass through it
        learns = module.training and any(param.requires_grad for param in module.parameters())
        return learns and torch.is_grad_enabled()

    def watch(
        self,
        layer: Layer,
        inputs: Tensor,
        outputs: Tensor,
        part: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().watch(layer, inputs, outputs, part)
        if self.fisher != "empirical":
            self.edges.append(get_gradient_edge(outputs))

    def observe(
        self, outputs: Tensor, loss: Likelihood, weights: Tensor, generator: torch.Generator
    ) -> None:
        """Go back from labels that the model would give: no .grad is written. weights: of terms."""
        if self.stale:
            self.forget()
        fixed, counted = outputs.detach(), weights > 0
        self.weighted = None if bool(counted.all()) else counted.reshape(len(weights), -1).any(1)
        if self.fisher == "exact" and not self.warned:
            warn_of_passes(outputs.shape)
            self.warned = True
        every = (
            hessian_roots(loss, fixed, weights)
            if self.fisher == "exact"
            else [sampled_slopes(loss, fixed, weights, generator)]
        )
        self.observing = True
        self.reached.clear()
        for slopes in every:
            torch.autograd.grad(outputs, self.edges, slopes, retain_graph=True, allow_unused=True)
            for name in list(self.waiting):
                self._fold(name)
        self.fold.end_inputs()
        for name in self.reached:
            self.terms[name] = self.terms.get(name, 0.0) + float(weights.sum())
        self.observing, self.weighted = False, None
        self.edges.clear()
        self.calls.clear()

    def take(self) -> dict[str, tuple[Sums, float]]:
        """The sums of every layer that was observed, and their number of loss terms."""
        for name in list(self.waiting):  # uses whose gradient never came, and those beside them
            self._fold(name)
        self.fold.end_inputs()
        self.calls.clear()
        taken = {name: (self.fold.sums[name], self.terms[name]) for name in self.terms}
        names = [layer.name for layer in self.layers if layer.name in taken]
        self.edges.clear()
        self.forget()
        return {name: taken[name] for name in names}

    def _take(self, event: Event) -> None:
        if self.stale:
            self.forget()
        if not self.observing or (self.fisher == "empirical" and not _accumulates(event.layer)):
            return
        name = event.layer.name
        number = torch._C._current_graph_task_id()
        self.waiting.setdefault(name, []).append((number, event))
        # at once: what all layers have seen, held to the end, would be the activations once more
        if len(self.waiting[name]) >= self.calls.get(name, 0):
            self._fold(name)
            if self.fisher == "empirical":
                self.calls[name] = 0

    def _fold(self, name: str) -> None:
        """Uses by as many examples in one pass are positions of these; others are apart."""
        alike: dict[tuple[int, int], list[Event]] = {}
        for number, event in self.waiting.pop(name):
            alike.setdefault((number, event.grads.size(1)), []).append(event)
        for (number, _), events in alike.items():
            layer = events[0].layer
            self.reached.add(name)
            dtype = next(layer.module.parameters()).dtype
            uses = joined(events, torch.promote_types(dtype, torch.float32), self.weighted)
            if self.fisher == "empirical":  # a term of the loss is an example
                uses = replace(uses, source=(number, *uses.source))
                self.terms[name] = self.terms.get(name, 0.0) + uses.grads.size(1)
            with torch.no_grad():
                self.fold.take(layer, uses)
                if name in self.bases:
                    eigenvalues_(self.fold.sums[name], uses, self.bases[name], layer.columns)


def _accumulates(layer: Layer) -> bool:
    """Whether this pass writes the gradient of a layer: not of `autograd.grad`, for something else.

    Checked where a parameter's gradient will be written, which autograd knows ahead.
    """
    for param in layer.module.parameters():
        if param.requires_grad:
            try:
                if torch._C._will_engine_execute_node(get_gradient_edge(param).node):
                    return True
            except RuntimeError:  # a parameter that autograd.grad returns the gradient of
                continue
    return False
