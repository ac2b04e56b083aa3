"""Natural gradient: steps along the inverse of a Kronecker-factored Fisher of every layer."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature.packing import pack, unpack
from isokron.curvature.sites import Site
from isokron.optim import checkpoint
from isokron.optim.adamw import AdamW
from isokron.optim.checks import check_gradients
from isokron.optim.fisher import State, direction, fold_, ready, refresh_, shapes
from isokron.optim.groups import check_group, check_number, check_param, param_name
from isokron.optim.moments import first_moment_
from isokron.optim.observing import Recorder, choose_sites
from isokron.optim.settings import SHARED

logger = logging.getLogger(__name__)

CHOICES = {"method": ("kfac", "ekfac"), "reduction": ("mean", "sum")}
LEAST_DAMPING, MOST_DAMPING = 1e-10, 1e4  # between which it is adapted


class NaturalGradient(torch.optim.Optimizer):
    """W ← W − lr·ν (F + λI)⁻¹M̂, F ≈ G ⊗ A layer by layer, M̂ the mean of gradients; rest: AdamW.

    It takes the model, because A and G are made of what layers see in the passes that are made
    anyway. `reduction`: whether the loss is the "mean" over examples, those of all passes before a
    step, or the "sum". `every`: steps between eigendecompositions, `statistics_every`: between looks
    at the layers, `factor_beta`: the mean's rate per look. `kl_clip` κ: ν = min(1, √(κ/(lr²⟨V, M̂⟩))).
    `method`: "ekfac" measures eigenvalues in the basis. `layers`: patterns of names; None is all of
    linear layers, convolutions and attention. `adapt_damping`: by the closure's loss after the step.
    `adamw_lr`, `betas` and `eps` are AdamW's, for all other parameters. See docs/natural.md.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.1,
        *,
        damping: float = 1e-3,
        every: int = 10,
        statistics_every: int = 1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        kl_clip: float | None = 1e-2,
        method: str = "kfac",
        layers: Iterable[str] | str | None = None,
        factor_beta: float = 0.95,
        reduction: str = "mean",
        adapt_damping: bool = False,
        adamw_lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
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
            "nonfinite": nonfinite,
            "steps": 0,
        }
        self.loss_scale = 1.0  # of a GradScaler: gradients of outputs are never unscaled by it
        self.skipped_steps = self.failed_refreshes = 0
        self._layers = [layers] if isinstance(layers, str) else layers and list(layers)
        self._attach(model)
        taken = {self._params[n] for site in self._sites for n in site.layout.params.values()}
        named = list(model.named_parameters())
        groups = [{"params": [(name, p) for name, p in named if p in taken], "lr": lr}]
        rest = [(name, p) for name, p in named if p not in taken]
        groups += [{"params": rest, "lr": adamw_lr}] if rest else []
        super().__init__(groups, {**SHARED, "lr": lr, **own})
        for group in self.param_groups:
            _check(group)
            for i, param in enumerate(group["params"]):
                check_param("NaturalGradient", param_name(group, i), param, group)
        self._bind()

    def _attach(self, model: nn.Module) -> None:
        """Find the layers; their hooks live as long as the optimizer does."""
        self.model = model
        self._params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._sites: list[Site] = choose_sites(model, self._layers)
        self._recorder = Recorder(self._sites, self._params)
        self._closing = weakref.finalize(self, self._recorder.__exit__)
        self._closing.atexit = False
        self._known: dict[str, State] = {site.name: {} for site in self._sites}
        self._expected: Tensor | None = None

    def _bind(self) -> None:
        """Share groups and state with the AdamW of the rest, and look if the next step is to."""
        self._rest: AdamW | None = None
        if len(self.param_groups) > 1:
            group = self.param_groups[1]
            self._rest = AdamW(group["params"], lr=0.0)
            self._rest.param_groups = [group]
            mine = {param: self.state[param] for param in group["params"] if param in self.state}
            self._rest.state.update(mine)
        self._arm()

    def _arm(self) -> None:
        """Hooks for a step that observes; none, and so no cost, for the others."""
        self._recorder.__exit__()
        group = self.param_groups[0]
        if self._closing.alive and group["steps"] % group["statistics_every"] == 0:
            if group["method"] == "ekfac":
                self._recorder.bases = {
                    name: (state["basis.output"], state.get("basis.input"))
                    for name, state in self._known.items()
                    if "basis.output" in state
                }
            self._recorder.__enter__()

    def close(self) -> None:
        """Take the hooks off the model; from then on the curvature stays as it is."""
        self._recorder.forget()
        self._closing()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_rest"):
            raise RuntimeError(
                "NaturalGradient has all parameters of its model and takes no other group; make it "
                "anew from the larger model"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what layers have shown while they were made."""
        super().zero_grad(set_to_none)
        self._recorder.forget()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        group = self.param_groups[0]
        if group["adapt_damping"] and closure is None:
            raise RuntimeError(
                "adapt_damping=True needs the loss after the step: pass a closure, or leave it False "
                "and call update_damping(loss_before, loss_after)"
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(param.grad is None for g in self.param_groups for param in g["params"]):
            return loss
        seen = self._recorder.observations(group["reduction"], float(self.loss_scale))
        unfit = check_gradients("NaturalGradient", self.param_groups, False) or _unfit(seen, group)
        if unfit:
            self.skipped_steps += 1
            logger.warning("skipped a step: %s", unfit)
            return loss
        for name, means in seen.items():
            fold_(self._known[name], means, group["factor_beta"])
        self._refresh(group)
        self._move_(group)
        if self._rest is not None:
            self._rest.step()
            self.state.update(self._rest.state)
        group["steps"] += 1
        self._show()
        self._arm()
        if group["adapt_damping"] and closure is not None:
            self._recorder.__exit__()  # this pass is no observation
            with torch.enable_grad():
                self.update_damping(float(loss), float(closure()))
            self._arm()
        return loss

    def update_damping(self, before: float, after: float, omega: float = 0.95) -> float:
        """Levenberg–Marquardt: λ ← ωλ where the quadratic model has held, λ/ω where it has not.

        ρ = (after − before) / (½δᵀ(F+λI)δ + ∇ᵀδ), both losses of the batch of the last step;
        ρ > ¾: ωλ, ρ < ¼: λ/ω. Steps of AdamW and weight decay are not in the model.
        """
        if self._expected is None:
            raise RuntimeError("update_damping needs a step before it; call step() first")
        group, expected = self.param_groups[0], float(self._expected)
        ratio = (after - before) / expected if expected < 0 else 0.5
        if not ratio >= 0.25:  # NaN too: the loss has left the numbers
            group["damping"] /= omega
        elif ratio > 0.75:
            group["damping"] *= omega
        group["damping"] = min(max(group["damping"], LEAST_DAMPING), MOST_DAMPING)
        return group["damping"]

    def _refresh(self, group: Mapping[str, Any]) -> None:
        """New bases where they are due: in steps 0, 1, 2, 4, 8, … up to `every`, then at its multiples."""
        step, every = group["steps"], group["every"]
        due = step % every == 0 or (step < every and step & (step - 1) == 0)
        for name, state in self._known.items():
            if "output" in state and (due or not ready(state)):
                if not refresh_(state, group["method"] == "ekfac"):
                    self.failed_refreshes += 1
                    logger.warning("no eigenbasis of layer %r was found; it keeps its own", name)

    def _move_(self, group: Mapping[str, Any]) -> None:
        """All directions, then their common scale, then the step."""
        moves: list[tuple[Site, Tensor]] = []
        slopes, actual = [], []
        for site in self._sites:
            found = self._direction(site, group)
            if found is not None:
                grad, moment, move = found
                moves.append((site, move))
                slopes.append((move * moment).sum().double().cpu())
                actual.append((move * grad).sum().double().cpu())
        if not moves:
            return
        lr, slope = float(group["lr"]), torch.stack(slopes).sum()
        size = lr
        if group["kl_clip"] is not None and float(slope) > 0 and lr > 0:
            size = lr * min(1.0, float((group["kl_clip"] / (lr**2 * slope)).sqrt()))
        self._expected = size**2 / 2 * slope - size * torch.stack(actual).sum()
        for site, move in moves:
            for key, value in unpack(site.layout, move).items():
                param = self._params[site.layout.params[key]]
                if param.grad is None:
                    continue
                own = param[slice(*site.layout.rows.get(key, (None,)))] if param.ndim else param
                if group["weight_decay"]:
                    own.mul_(1 - lr * group["weight_decay"])
                own.sub_((value * size).to(param.dtype))

    def _direction(
        self, site: Site, group: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The gradient of a layer, its debiased mean, and where to go. [B, o, i] each"""
        state, own = self._known[site.name], site.layout.params.values()
        params = {name: self._params[name] for name in own}
        grads = {name: param.grad for name, param in params.items()}
        if all(grad is None for grad in grads.values()):
            return None
        if not ready(state):
            if "output" in state:
                return None  # its first refresh failed; it waits for one that does not
            raise RuntimeError(
                f"layer {site.name!r} has a gradient, but no pass of it was seen; make passes in "
                "training mode and call the layer itself, or name the other layers in `layers`"
            )
        known = {
            name: torch.zeros_like(params[name]) if grad is None else grad
            for name, grad in grads.items()
        }
        wide = torch.promote_types(next(iter(params.values())).dtype, torch.float32)
        grad = pack(site.layout, known).to(wide)
        state["step"] = state.get("step", torch.zeros(())) + 1
        moment = grad
        if group["momentum"] > 0:
            mean = state.setdefault("momentum", torch.zeros_like(grad))
            moment = first_moment_(mean, grad, group["momentum"], False, state["step"])
        return grad, moment, direction(moment, state, group["damping"])

    # Checkpoints: a layer's state stands under its first parameter.

    def _home(self, site: Site) -> tuple[Tensor, str]:
        """The parameter that holds a layer's state, and what its keys begin with where it is shared."""
        first = self._params[next(iter(site.layout.params.values()))]
        return first, f"{site.name.rpartition('.')[2]}." if site.layout.rows else ""

    def _show(self) -> None:
        """Let `optimizer.state` be the state of the layers."""
        for site in self._sites:
            param, prefix = self._home(site)
            if state := self._known[site.name]:
                self.state[param].update({prefix + key: value for key, value in state.items()})

    def _adopt(self) -> None:
        """Take a loaded state for the layers' own, in memory of their own."""
        for site in self._sites:
            param, prefix = self._home(site)
            saved = self.state.get(param, {})
            state = {
                key.removeprefix(prefix): torch.as_tensor(value).clone()
                for key, value in saved.items()
                if key.startswith(prefix)
            }
            for key, shape in shapes(state, site.layout.shape).items():
                if tuple(state[key].shape) != shape:
                    raise ValueError(
                        f"NaturalGradient: {key!r} of layer {site.name!r} has shape "
                        f"{tuple(state[key].shape)} in the checkpoint and {shape} here; load it "
                        "into the model that saved it"
                    )
                if shape:
                    state[key] = state[key].to(param.device)
            self._known[site.name] = state

    def state_dict(self) -> dict[str, Any]:
        """Flat keys and plain tensors; loads with weights_only=True. To be taken after a step."""
        packed = super().state_dict()
        packed["state"] = {
            index: {key: v.clone() if key == "step" else v for key, v in entry.items()}
            for index, entry in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state dict, to the bit."""
        handle = self.register_load_state_dict_pre_hook(checkpoint.shield)
        before = {"state": self.state, "param_groups": self.param_groups}
        try:
            super().load_state_dict(dict(state_dict))
        except Exception:
            self.__setstate__(before)
            raise
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        own = ("model", "_layers", "loss_scale", "skipped_steps", "failed_refreshes")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, by copying and by torch's load_state_dict."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no group here has a use for it
        if "model" in state:
            self._attach(state["model"])
        checkpoint.unshield(self.state)
        self._recorder.forget()
        self._adopt()
        self._show()
        self._bind()


def _unfit(seen: Mapping[str, Mapping[str, Tensor]], group: Mapping[str, Any]) -> str | None:
    """Why what layers have shown cannot be used; raises where that is asked for."""
    if group["nonfinite"] == "ignore":
        return None
    for name, means in seen.items():
        if not all(bool(value.sum().isfinite()) for value in means.values()):
            wrong = f"inputs or gradients of layer {name!r} are not finite"
            if group["nonfinite"] == "raise":
                raise FloatingPointError(
                    f'NaturalGradient: {wrong}; nothing was changed. Pass nonfinite="skip" to leave '
                    "such steps out"
                )
            return wrong
    return None


def _check(group: Mapping[str, Any]) -> None:
    check_group("NaturalGradient", group)
    check_number("NaturalGradient", "damping", group["damping"], "above 0")
    if group["kl_clip"] is not None:
        check_number("NaturalGradient", "kl_clip", group["kl_clip"], "above 0")
    for name, choices in CHOICES.items():
        if group[name] not in choices:
            raise ValueError(
                f"NaturalGradient: {name} must be one of {', '.join(map(repr, choices))}, got "
                f"{name}={group[name]!r}"
            )
    every = group["statistics_every"]
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(
            "NaturalGradient: statistics_every must be a whole number of at least 1, got "
            f"statistics_every={every!r}"
        )
    beta = group["factor_beta"]
    if not isinstance(beta, float | int) or not 0 <= beta <= 1:
        raise ValueError(
            "NaturalGradient: factor_beta must be at least 0 and at most 1, got "
            f"factor_beta={beta!r}"
        )
