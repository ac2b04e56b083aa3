"""Natural gradient: steps along the inverse of a Kronecker-factored Fisher of every layer."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isokron.distributed import TIMEOUT, Ranks, asked_by_torch, ranks_of
from isokron.linalg import on_host, sent
from isokron.optim import checkpoint
from isokron.optim.adamw import AdamW
from isokron.optim.fisher import adapted_damping
from isokron.optim.groups import check_param, learning_rate, param_name
from isokron.optim.layers import Layers
from isokron.optim.looking import asks_for_state, look
from isokron.optim.loss_scale import ScaledLoss
from isokron.optim.natural_settings import check_natural, check_reduce, check_whole, warn_of_ranks
from isokron.optim.pooling import Pooling
from isokron.optim.settings import SHARED

logger = logging.getLogger(__name__)


class NaturalGradient(ScaledLoss, torch.optim.Optimizer):
    """W ← W − lr·ν·V, V = (F + λI)⁻¹M̂, F ≈ G ⊗ A layer by layer, M̂ the mean of gradients.

    It takes the model, since A and G are made of what layers see in passes that are made anyway.
    `reduction`: whether the loss is the "mean" over the examples of all passes before a step, or
    their "sum", or on ranks the "global_mean". `every`: steps between eigendecompositions,
    `statistics_every`: between looks at layers, `factor_beta`: rate of the means, per look.
    `kl_clip` κ: ν = min(1, √(κ / lr²⟨V, M̂⟩)).
    `method`: "ekfac" measures eigenvalues in the bases. `layers`: patterns of names; None is all
    linear layers, convolutions and attention. `adapt_damping`: by the closure's loss after a step.
    `adamw_lr`, `betas`, `eps`: of AdamW, which has all other parameters. See docs/natural.md.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-2,
        *,
        damping: float = 1e-3,
        every: int = 10,
        statistics_every: int = 1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        kl_clip: float | None = 1e-3,
        method: str = "kfac",
        layers: Iterable[str] | str | None = None,
        factor_beta: float = 0.95,
        reduction: str = "mean",
        adapt_damping: bool = False,
        adamw_lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                "NaturalGradient takes the model, whose layers it observes, got "
                f"{type(model).__name__}; write NaturalGradient(model)"
            )
        own = {
            "damping": damping,
            "every": every,
            "statistics_every": statistics_every,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "kl_clip": kl_clip,
            "method": method,
            "factor_beta": factor_beta,
            "reduction": reduction,
            "adapt_damping": adapt_damping,
            "betas": betas,
            "eps": eps,
            "maximize": maximize,
            "nonfinite": nonfinite,
            "steps": 0,
        }
        self.skipped_steps = 0
        self.ranks: Ranks | None = None
        self.reduce, self._warned = "auto", False
        several = [layers] if isinstance(layers, str) else layers
        self._patterns = None if several is None else list(several)
        self._attach(model)
        taken, named = self._layers.taken(), list(model.named_parameters())
        groups = [{"params": [(name, p) for name, p in named if p in taken], "lr": lr}]
        rest = [(name, p) for name, p in named if p not in taken]
        groups += [{"params": rest, "lr": adamw_lr}] if rest else []
        super().__init__(groups, {**SHARED, "lr": lr, **own})
        for group in self.param_groups:
            check_natural(group)
            for i, param in enumerate(group["params"]):
                check_param("NaturalGradient", param_name(group, i), param, group)
                check_whole(param_name(group, i), param)
        self._bind()

    def distribute(
        self, group: Any = None, *, reduce: str = "auto", timeout: float = TIMEOUT
    ) -> None:
        """Share what layers see with the processes of a group, by default all, while DDP or you
        average the gradients. Call it on all of them before the first step.

        `reduce`: how statistics travel, see isokron.optim.modes. `timeout`: seconds that a process
        waits for others.
        """
        if self.state or self.param_groups[0]["steps"]:
            raise RuntimeError(
                "NaturalGradient: distribute() must come before the first step, and before a state "
                "is loaded; make the optimizer anew"
            )
        check_reduce(reduce, self.param_groups[0]["method"])
        self.ranks, self.reduce = ranks_of(group, timeout), reduce
        self._closing()
        self._attach(self.model)
        self._bind()

    def _attach(self, model: nn.Module) -> None:
        """Find the layers; their hooks live as long as the optimizer does."""
        pooling = None if self.ranks is None else Pooling(self.ranks, self.reduce)
        self.model, self._layers = model, Layers(model, self._patterns, pooling)
        self._closing = weakref.finalize(self, self._layers.recorder.__exit__)
        self._closing.atexit = False
        self._expected: float | Tensor | None = None

    def _bind(self) -> None:
        """Share groups and state with the AdamW of the rest, and hook what the next step needs."""
        self._rest: AdamW | None = None
        if len(self.param_groups) > 1:
            group = self.param_groups[1]
            self._rest = AdamW(group["params"], lr=0.0)
            self._rest.param_groups = [group]
            mine = {param: self.state[param] for param in group["params"] if param in self.state}
            self._rest.state.update(mine)
        self._arm()

    def _looks(self) -> bool:
        """Whether this step observes the layers."""
        group = self.param_groups[0]
        return self._closing.alive and group["steps"] % group["statistics_every"] == 0

    def _arm(self) -> None:
        """Hooks for a step that observes; none, and so no cost, for the others."""
        self._layers.recorder.__exit__()
        if self._looks():
            self._layers.watch(self.param_groups[0]["method"] == "ekfac")

    def end_passes(self) -> None:
        self._layers.recorder.over = True

    def close(self) -> None:
        """Take the hooks off the model; from then on the curvature stays as it is."""
        self._layers.recorder.forget()
        self._closing()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_rest"):
            raise RuntimeError(
                "NaturalGradient has all parameters of its model and takes no other group; make it "
                "anew from the larger model"
            )
        super().add_param_group(param_group)

    @property
    def failed_refreshes(self) -> int:
        """How many eigendecompositions have failed and left their layers what they had."""
        layers = self._layers
        if layers.unread:
            layers.note([bool(failed) for (failed,) in on_host(list(layers.unread.values()))])
            layers.show(self.state)
        return layers.failed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what layers have shown while they were made."""
        super().zero_grad(set_to_none)
        self._layers.recorder.forget()
        self._scaler_scale = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss, group = None, self.param_groups[0]
        if closure is None and not self.state and asks_for_state(self._layers, self.param_groups):
            self._make_state()
            return None
        if group["adapt_damping"] and closure is None:
            raise RuntimeError(
                "adapt_damping=True needs the loss after the step: pass a closure, or leave it "
                "False and call update_damping(loss_before, loss_after)"
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.ranks is None and not self._warned:
            self._warned = True
            warn_of_ranks()
        seen, unfit = look(self._layers, self.param_groups, self.taken_scale())
        if unfit is not None:
            self.skipped_steps += 1
            logger.warning("skipped a step: %s", unfit)
        if unfit is not None or seen is None:
            return loss
        if self._looks() or not self._closing.alive:  # else a layer that has thawed waits its turn
            self._layers.check_known(seen)
        self._layers.fold_(seen, group["factor_beta"])
        self._refresh(group)
        self._move_(group)
        if self._rest is not None:
            self._rest.step_checked()
            self.state.update(self._rest.state)
        group["steps"] += 1
        self._layers.show(self.state)
        self._arm()
        if group["adapt_damping"] and closure is not None and loss is not None:
            self._layers.recorder.__exit__()  # this pass is no observation
            with torch.enable_grad():
                after = closure()
            self.update_damping(*(float(torch.as_tensor(x).detach()) for x in (loss, after)))
            self._arm()
        return loss

    def _make_state(self) -> None:
        """State to be loaded into. Training without loading goes on as if it were not there."""
        self._layers.show(self.state, group=self.param_groups[0])
        if self._rest is not None:
            self._rest.step_checked()
            for entry in self._rest.state.values():
                entry["step"].zero_()
            self.state.update(self._rest.state)

    def update_damping(self, before: float, after: float, omega: float = 0.95) -> float:
        """Levenberg–Marquardt: λ ← ωλ where the quadratic model has held, λ/ω where it has not.

        ρ = (after − before) / (½δᵀ(F+λI)δ + ∇ᵀδ), both losses of the batch of the last step;
        ρ > ¾: ωλ, ρ < ¼: λ/ω. Steps of AdamW and weight decay are not in the model. With ranks, all
        call it, each with its own losses: it looks at their mean, or at the sum of sums.
        """
        if self._expected is None:
            raise RuntimeError("update_damping needs a step before it; call step() first")
        group, expected = self.param_groups[0], float(self._expected)
        if (pooling := self._layers.pooling) is not None:
            parts = 1 if group["reduction"] == "sum" else pooling.ranks.size
            before, after = (total / parts for total in pooling.total([before, after]))
        change = before - after if group["maximize"] else after - before
        group["damping"] = adapted_damping(group["damping"], change, expected, omega)
        return group["damping"]

    def _refresh(self, group: Mapping[str, Any]) -> None:
        """In steps 0, 1, 2, 4, 8, … up to `every`, while little is known, then at its multiples."""
        step, every = group["steps"], group["every"]
        due = step % every == 0 or (step < every and step & (step - 1) == 0)
        self._layers.refresh_(due, group["method"] == "ekfac")

    def _move_(self, group: Mapping[str, Any]) -> None:
        """All directions, then their common scale, then the step."""
        moves = self._layers.moves(group)
        if not moves:
            return
        lr = float(learning_rate(group))
        slope = _total([(move.direction, move.moment) for move in moves])
        # ⟨V, (F + λI)V⟩ = ⟨V, M̂⟩: what the quadratic model says this step will change
        falls = _total([(move.direction, move.grad) for move in moves])
        if self._layers.pooling is not None:  # on unlike machines they may differ by rounding
            agreed = self._layers.pooling.same([float(slope), float(falls)])
            slope, falls = torch.tensor(agreed, dtype=torch.float64).unbind()
        size = torch.full_like(slope, lr)
        if group["kl_clip"] is not None:
            clipped = (group["kl_clip"] / slope).sqrt()
            size = torch.where(lr**2 * slope > group["kl_clip"], clipped, size)
        self._expected = size**2 / 2 * slope - size * falls  # read only where damping is adapted
        for move in moves:
            self._layers.write_(move, size, lr * group["weight_decay"])

    def state_dict(self) -> dict[str, Any]:
        """Flat keys and plain tensors; loads with weights_only=True. To be taken after a step.

        It is the same on all ranks and for any number of them. All call it where reduce="gram".
        """
        _ = self.failed_refreshes  # what failed leaves nothing in the state
        named = asked_by_torch() is not None
        shown = dict(self.state)
        self._layers.show(self.state, whole=True, group=self.param_groups[0] if named else None)
        packed = super().state_dict()
        self.state.clear()
        self.state.update(shown)
        if named:
            packed["param_groups"] = checkpoint.spelt(packed)
        packed["state"] = {
            index: {key: v.clone() if key == "step" else v for key, v in entry.items()}
            for index, entry in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state dict, to the bit."""
        with checkpoint.taking_over(self):
            super().load_state_dict(dict(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        # not the ranks, which belong to this process
        own = {key: getattr(self, key) for key in ("_patterns", "loss_scale", "skipped_steps")}
        return {
            **super().__getstate__(),
            "model": self.model,
            "_failed": self.failed_refreshes,
            **own,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, by copying and by torch's load_state_dict."""
        failed = state.pop("_failed", 0)
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no group here has a use for it
        if "model" in state:
            self.ranks, self.reduce, self._warned = None, "auto", False
            self._attach(state["model"])
            self._layers.failed = failed
        checkpoint.unshield(self.state)
        self._layers.recorder.forget()
        self._layers.adopt(self.state)
        self._layers.show(self.state)
        self._bind()


def _total(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ ⟨X, Y⟩ in float64, on the device of the first. []"""
    products = [(x * y).sum().double() for x, y in pairs]
    device = products[0].device
    return torch.stack([sent(product, device) for product in products]).sum()
