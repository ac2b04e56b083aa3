"""The layers of a model as an optimizer has them: what is known of each, and where that is kept."""

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isokron.curvature.packing import pack, unpack
from isokron.curvature.sites import Site
from isokron.optim.fisher import State, direction, fold_, ready, refresh_, shapes
from isokron.optim.moments import first_moment_
from isokron.optim.observing import Recorder, choose_sites

logger = logging.getLogger(__name__)


class Move(NamedTuple):
    """A layer's gradient, the debiased mean of it, and where to go. [B, o, i] each"""

    site: Site
    grad: Tensor
    moment: Tensor
    direction: Tensor


class Layers:
    """All layers that are preconditioned. A layer's state is shown under its first parameter."""

    def __init__(self, model: nn.Module, patterns: list[str] | None) -> None:
        self.params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.sites = choose_sites(model, patterns)
        self.recorder = Recorder(self.sites)
        self.known: dict[str, State] = {site.name: {} for site in self.sites}

    def own(self, site: Site) -> dict[str, Tensor]:
        return {name: self.params[name] for name in site.layout.params.values()}

    def taken(self) -> set[Tensor]:
        return {param for site in self.sites for param in self.own(site).values()}

    def watch(self, correct: bool) -> None:
        """Put hooks on; `correct`: and measure Λ where there is a basis for it."""
        self.recorder.bases = {
            name: (state["basis.output"], state.get("basis.input"))
            for name, state in self.known.items()
            if correct and "basis.output" in state
        }
        self.recorder.__enter__()

    def fold_(self, seen: Mapping[str, Mapping[str, Tensor]], beta: float) -> None:
        for name, means in seen.items():
            fold_(self.known[name], means, beta)

    def refresh_(self, due: bool, correct: bool) -> int:
        """New bases where they are due or there are none; how many could not be found."""
        failed = 0
        for name, state in self.known.items():
            wanted = "output" in state and (due or not ready(state))
            if wanted and not refresh_(state, correct):
                failed += 1
                logger.warning("no eigenbasis of layer %r was found; it keeps what it has", name)
        return failed

    def check_known(self, seen: Mapping[str, Any]) -> None:
        """Refuse, before anything changes, a gradient of a layer of which nothing is known."""
        for site in self.sites:
            if site.name in seen or self.known[site.name]:
                continue
            if any(param.grad is not None for param in self.own(site).values()):
                raise RuntimeError(
                    f"layer {site.name!r} has a gradient, but no pass of it was seen; make passes "
                    "in training mode and call the layer itself, or name in `layers` only others"
                )

    def moves(self, group: Mapping[str, Any]) -> list[Move]:
        """Of every layer that has a gradient and a basis."""
        found = []
        for site in self.sites:
            state, params = self.known[site.name], self.own(site)
            if ready(state) and any(param.grad is not None for param in params.values()):
                found.append(self._move(site, state, params, group))
        return found

    def _move(
        self, site: Site, state: State, params: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> Move:
        grads = {
            name: torch.zeros_like(param) if param.grad is None else param.grad
            for name, param in params.items()
        }
        matrix = pack(site.layout, grads)
        grad = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        state["step"] = state.get("step", torch.zeros(())) + 1
        moment = grad
        if group["momentum"] > 0:
            mean = state.setdefault("momentum", torch.zeros_like(grad))
            moment = first_moment_(mean, grad, group["momentum"], False, state["step"])
        return Move(site, grad, moment, direction(moment, state, group["damping"]))

    def write_(self, move: Move, size: float, decay: float) -> None:
        """W ← (1 − decay)W − size·V, where there is a gradient."""
        layout = move.site.layout
        for key, value in unpack(layout, move.direction).items():
            param = self.params[layout.params[key]]
            if param.grad is not None:
                own = param[slice(*layout.rows[key])] if key in layout.rows else param
                own.mul_(1 - decay).sub_((value * size).to(param.dtype))

    def _home(self, site: Site) -> tuple[Tensor, str]:
        """Where a layer's state is shown, and what its keys begin with if others are there too."""
        first = next(iter(self.own(site).values()))
        return first, f"{site.name.rpartition('.')[2]}." if site.layout.rows else ""

    def show(self, shown: MutableMapping[Tensor, Any]) -> None:
        """Let this be the optimizer's state: flat keys and plain tensors."""
        for site in self.sites:
            param, prefix = self._home(site)
            if state := self.known[site.name]:
                entry = {prefix + key: value for key, value in state.items()}
                shown[param] = {**shown.get(param, {}), **entry}

    def adopt(self, shown: Mapping[Tensor, Any]) -> None:
        """Take what is shown for the layers' own, in memory of their own."""
        for site in self.sites:
            param, prefix = self._home(site)
            state = {
                key.removeprefix(prefix): torch.as_tensor(value).clone()
                for key, value in shown.get(param, {}).items()
                if key.startswith(prefix)
            }
            for key, shape in shapes(state, site.layout.shape).items():
                if tuple(state[key].shape) != shape:
                    raise ValueError(
                        f"NaturalGradient: {key!r} of layer {site.name!r} has shape "
                        f"{tuple(state[key].shape)} in the checkpoint and {shape} here; load it "
                        "into the model that saved it"
                    )
                state[key] = state[key].to(param.device if shape else "cpu")
            self.known[site.name] = state
