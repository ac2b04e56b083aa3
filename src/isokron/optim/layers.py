"""The layers of a model as an optimizer has them: what is known of each, and where that is kept."""

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isokron.curvature.layers import Layer as Site
from isokron.curvature.layers import pack, unpack
from isokron.linalg import sent
from isokron.optim import thin
from isokron.optim.fisher import (
    State,
    decomposed,
    direction,
    filled,
    fold_,
    forget_,
    known,
    ready,
    refresh_,
    shapes,
    sides,
)
from isokron.optim.modes import mode_of
from isokron.optim.moments import first_moment_
from isokron.optim.observing import Recorder, choose_sites
from isokron.optim.pooling import Pooling

logger = logging.getLogger(__name__)


class Move(NamedTuple):
    """A layer's gradient, the debiased mean of it, and where to go. [B, o, i] each"""

    site: Site
    grad: Tensor
    moment: Tensor
    direction: Tensor


class Layers:
    """All layers that are preconditioned. A layer's state is shown under its first parameter.

    `pooling`: with the other ranks, or None.
    """

    def __init__(
        self, model: nn.Module, patterns: list[str] | None, pooling: Pooling | None = None
    ) -> None:
        self.pooling = pooling
        self.params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.sites = choose_sites(model, patterns)
        self.rows = {site.name: site.layout.shape[1] for site in self.sites}
        self.recorder = Recorder(self.sites)
        self.known: dict[str, State] = {site.name: {} for site in self.sites}
        self.failed = 0  # refreshes
        self.unread: dict[tuple[str, bool], Tensor] = {}  # (layer, its first?) → whether it failed

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
        if self.pooling is not None:
            keeps = self.pooling.keeps
            self.recorder.keeps = {
                site.name: keeps(*self.thin(site.name, correct)) for site in self.sites
            }
        self.recorder.__enter__()

    def thin(self, name: str, correct: bool) -> tuple[bool, bool]:
        """Whether the output side is kept as columns or may be, and whether that is settled."""
        state = self.known[name]
        settled = "columns" in state or "output" in state
        return ("columns" in state if settled else not correct), settled

    def fold_(self, seen: Mapping[str, Mapping[str, Tensor]], beta: float) -> None:
        for name, means in seen.items():
            fold_(self.known[name], means, beta)
        grams = self._grams([n for n in seen if thin.long(self.known[n], self.rows[n])])
        for name, pair in zip(grams, self._decomposed(list(grams.values())), strict=True):
            thin.shorten_(self.known[name], *pair, self.rows[name], name)

    def refresh_(self, due: bool, correct: bool) -> None:
        """New bases where they are due or there are none; whether they were found stays unread."""
        names = [
            name
            for name, state in self.known.items()
            if ("output" in state or "columns" in state) and (due or not ready(state))
        ]
        matrices = {(n, side): side_ for n in names for side, side_ in sides(self.known[n]).items()}
        matrices |= {(name, "columns"): gram for name, gram in self._grams(names).items()}
        made: dict[str, State] = {name: {} for name in names}
        found = self._decomposed(list(matrices.values()))
        for (name, side), (values, basis) in zip(matrices, found, strict=True):
            if side == "columns":
                made[name] |= thin.basis_of(self.known[name], values, basis, self.rows[name])
            else:
                made[name] |= {f"values.{side}": values, f"basis.{side}": basis}
        for name in names:
            state, first = self.known[name], not ready(self.known[name])
            self.unread[name, first] = refresh_(state, made[name], correct)

    def note(self, failed: list[bool]) -> None:
        """Count and log refreshes that failed, given the values of what was unread."""
        for (name, first), bad in zip(self.unread, failed, strict=True):
            if bad:
                self.failed += 1
                logger.warning("no eigenbasis of layer %r was found; it keeps what it has", name)
            if bad and first:
                forget_(self.known[name])
        self.unread.clear()

    def _decomposed(self, matrices: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        if self.pooling is None:
            return [decomposed(matrix) for matrix in matrices]
        return self.pooling.decompose(matrices, decomposed)

    def _grams(self, names: list[str]) -> dict[str, Tensor]:
        """UᵀU, where there are columns U."""
        thin_ones = [name for name in names if "columns" in self.known[name]]
        if self.pooling is None:
            return {}
        return {name: thin.gram_of(self.known[name], self.pooling.ranks) for name in thin_ones}

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
        grad = -grad if group["maximize"] else grad
        state["step"] = state.get("step", torch.zeros(())) + 1
        moment = grad
        if group["momentum"] > 0:
            mean = state.setdefault("momentum", torch.zeros_like(grad))
            moment = first_moment_(mean, grad, group["momentum"], False, state["step"])
        if "columns" in state and self.pooling is not None:
            found = thin.direction(moment, state, group["damping"], self.pooling.ranks)
        else:
            found = direction(moment, state, group["damping"])
        return Move(site, grad, moment, found)

    def write_(self, move: Move, size: float | Tensor, decay: float) -> None:
        """W ← (1 − decay)W − size·V, where there is a gradient."""
        if isinstance(size, Tensor):
            size = sent(size, move.direction.device)
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

    def show(
        self,
        shown: MutableMapping[Tensor, Any],
        whole: bool = False,
        group: Mapping[str, Any] | None = None,
    ) -> None:
        """Let this be the optimizer's state: flat keys and plain tensors.

        `whole`: with the rows of all ranks, for which all ranks have to call. `group`: with every
        key that its settings give a layer, as torch.distributed.checkpoint has to find them.
        """
        entries: dict[Tensor, dict[str, Any]] = {}
        for site in self.sites:
            state: dict[str, Any] = self.known[site.name]
            if whole and self.pooling is not None and "columns" in state:
                state = thin.whole(state, site.layout.shape[1], self.pooling.ranks)
            if group is not None:
                state = self._filled(site, state, group)
            if not state:
                continue
            param, prefix = self._home(site)
            entry = {prefix + key: value for key, value in state.items()}
            entries.setdefault(param, {}).update(entry)
            for other in self.own(site).values():  # torch looks for an entry of each
                entries.setdefault(other, {"step": state.get("step", torch.zeros(()))})
        shown.update(entries)

    def _filled(self, site: Site, state: State, group: Mapping[str, Any]) -> dict[str, Any]:
        kind, columns = site.kind, False
        if self.pooling is not None and kind != "diagonal" and group["method"] == "kfac":
            columns = mode_of(self.rows[site.name], 0, self.pooling.reduce) == "gram"
        return filled(state, kind, site.layout.shape, self._home(site)[0], group, columns)

    def adopt(self, shown: Mapping[Tensor, Any]) -> None:
        """Take what is shown for the layers' own, in memory of their own."""
        for site in self.sites:
            param, prefix = self._home(site)
            entry = {
                key.removeprefix(prefix): value
                for key, value in shown.get(param, {}).items()
                if key.startswith(prefix)
            }
            state = {k: torch.as_tensor(v).clone() for k, v in thin.unpacked(entry).items()}
            state = known(state)
            own = self._own_rows_(site, state) if "columns" in state else None
            for key, shape in shapes(state, site.layout.shape, own).items():
                if tuple(state[key].shape) != shape:
                    raise ValueError(
                        f"NaturalGradient: {key!r} of layer {site.name!r} has shape "
                        f"{tuple(state[key].shape)} in the checkpoint and {shape} here; load it "
                        "into the model that saved it"
                    )
                state[key] = state[key].to(param.device if shape else "cpu")
            self.known[site.name] = state

    def _own_rows_(self, site: Site, state: State) -> int:
        """Leave only this rank's rows of columns; how many these are."""
        if self.pooling is None:
            raise ValueError(
                f"NaturalGradient: layer {site.name!r} of the checkpoint is kept as columns, as "
                'reduce="gram" has it; load it after optimizer.distribute(reduce="gram")'
            )
        return thin.own_(state, site.layout.shape[1], self.pooling.ranks)
