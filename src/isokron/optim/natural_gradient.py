"""NaturalGradient: steps along the inverse of a Kronecker-factored Fisher of every layer."""

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature.curvature import condition_number
from isokron.curvature.fit import policy_by_layer
from isokron.curvature.layer_report import CurvatureReport
from isokron.curvature.losses import CrossEntropy, Likelihood
from isokron.curvature.observer import Observer
from isokron.curvature.running_fisher import COUNTS, Damping, RunningFisher
from isokron.distributed import TIMEOUT, Ranks, process_count, ranks_of
from isokron.distributed.rank_tasks import together
from isokron.linalg.precision import full_precision
from isokron.names import answered
from isokron.operators.low_rank import LARGE
from isokron.optim.adamw import AdamW
from isokron.optim.checkpoint import asks_for_state, saved_groups, saved_value
from isokron.optim.checkpoint_header import checked, format_of, not_finite
from isokron.optim.gradient_checks import check_shapes, noting_errors, refuse_after_error
from isokron.optim.natural_checks import (
    REDUCTIONS,
    SAME,
    Shown,
    check_arguments,
    check_not_sharded,
    check_same,
    check_shown,
    choose_layers,
    compare_ranks,
    find_problem,
)
from isokron.optim.natural_state import add_adamw_, layer_entries, load_adamw_, load_layers_
from isokron.optim.natural_step import Observed, adapted, layer_means, refresh_, write_
from isokron.optim.settings import plain, without_switches
from isokron.optim.statistics import MOST_CONDITION, Statistics, summary
from isokron.optim.wrapped_models import unwrapped

logger = logging.getLogger(__name__)

# arguments that are settings of the parameter group, and so in checkpoints
SETTINGS = (
    *("lr", "method", "damping", "max_condition", "every", "statistics_every", "momentum"),
    *("weight_decay", "kl_clip", "factor_beta", "reduction", "nonfinite", *SAME),
)


class NaturalGradient(torch.optim.Optimizer):
    """W ← W − lr·ν·V, V = (F + λI)⁻¹M̂, F ≈ G ⊗ A layer by layer, M̂ the mean of gradients.

    It takes the model, because A and G are computed by hooks on its layers; see docs/natural.md.

    Args:
        model: all of its parameters are stepped, those without a layer named here by AdamW.
        method: "kfac"; "ekfac" measures eigenvalues in the eigenbases; "tkfac" keeps traces.
        fisher: gradients of the data's labels ("empirical"), of labels drawn from the model
            ("sampled") or of all labels ("exact"); the last two need `observe(outputs)`.
        loss: whose distribution `observe` draws from; CrossEntropy() by default.
        damping: λ of G ⊗ A + λI; or (λ_G, λ_A) of (G + λ_G I) ⊗ (A + λ_A I), whose product damps
            the eigenvalues of EK-FAC; see also `update_damping`.
        max_condition: κ; eigenvalues below their maximum/κ are lifted to it.
        every: steps between eigendecompositions.
        statistics_every: steps between observations.
        momentum: μ of M ← μM + (1−μ)∇.
        factor_beta: rate of the means, per observation.
        kl_clip: most of lr²⟨V, M̂⟩, twice the KL divergence that a step may cause; None: no limit.
        layers: patterns of names; None: linear layers, convolutions and attention.
        policy: which output sides are kept as gradients (Woodbury), with `rho`, `t_max`, `o_max`,
            `store` and `store_dtype`, as in `curvature.fit`; past `t_max` the best half is kept.
            None: twice as many as outputs up to 512 of these, where G is exact, and 128 above.
        reduction: whether the loss is the "mean" over the examples of all passes before a step,
            their "sum", or on ranks the "global_mean".
        adamw_lr: learning rate of AdamW, which steps all other parameters.
        betas: rates of AdamW's moments.
        nonfinite: "raise", "skip" the step or "ignore" gradients that are not finite.
    """

    step_error = ""

    @without_switches
    @answered
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-2,
        *,
        method: str = "kfac",
        fisher: str = "empirical",
        loss: Likelihood | None = None,
        damping: float | tuple[float, float] = 1e-3,
        max_condition: float | None = None,
        every: int = 10,
        statistics_every: int = 1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        kl_clip: float | None = 1e-3,
        layers: Iterable[str] | str | None = None,
        factor_beta: float = 0.95,
        policy: str | Mapping[str, str] = "dense",
        rho: float = 0.75,
        t_max: int | None = None,
        o_max: int = LARGE,
        store: str = "auto",
        store_dtype: torch.dtype | None = None,
        reduction: str = "mean",
        adamw_lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        nonfinite: str = "raise",
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        if not isinstance(model, nn.Module):
            raise TypeError(
                "NaturalGradient takes the model, whose layers it observes, and no groups, got "
                f"{type(model).__name__}; write NaturalGradient(model), with the learning rate of "
                "its layers in lr= and that of everything else in adamw_lr="
            )
        check_arguments(arguments)
        model = unwrapped(model)
        patterns = [layers] if isinstance(layers, str) else None if layers is None else list(layers)
        chosen = choose_layers(model, patterns, "skip" if policy == "dense" else "lowrank")
        policies = policy_by_layer(policy, [layer.name for layer in chosen])
        woodbury: Any = {"rho": rho, "t_max": t_max, "o_max": o_max}
        woodbury |= {"storage": store, "dtype": store_dtype}
        self._fishers = fishers = {
            layer.name: RunningFisher(layer, method, policies[layer.name], **woodbury)
            for layer in chosen
        }
        params = dict(model.named_parameters(remove_duplicate=False))
        self._params: dict[str, dict[str, Tensor]] = {
            layer.name: {name: params[name] for name in layer.layout.params.values()}
            for layer in chosen
        }
        in_layers = {param for named in self._params.values() for param in named.values()}
        named_params = list(model.named_parameters())
        first = [(name, param) for name, param in named_params if param in in_layers]
        for_adamw = [(name, param) for name, param in named_params if param not in in_layers]
        group = {key: arguments[key] for key in SETTINGS}
        group |= {"loss": type(loss or CrossEntropy()).__name__, "format": format_of(type(self))}
        group |= {"lr_scale": 1.0, "maximize": False, "steps": 0}
        super().__init__([{"params": first}], group)
        check_not_sharded(self.param_groups[0])
        self._shapes: dict[Tensor, torch.Size] = {param: param.shape for _, param in first}
        self._adamw: AdamW | None = None
        if for_adamw:
            self._adamw = AdamW(
                for_adamw, adamw_lr, betas, weight_decay=weight_decay, state_dtype=torch.float32
            )
            self.param_groups.append(self._adamw.param_groups[0])
        self.model, self.fisher = model, fisher
        self.loss: Likelihood = CrossEntropy() if loss is None else loss
        self.ranks: Ranks | None = None
        self.loss_scale: float | Tensor = 1.0
        self.skipped_steps = self.failed_refreshes = 0
        self._arguments, self._warned, self._shares_gram = arguments, False, False
        self._scaler_scale: float | None = None
        self._expected: float | Tensor | None = None  # change of the loss in the last step
        self._draws = 0  # calls of `observe` in this step
        self._shown: Shown = {}
        # of the last step: ‖update/lr‖² and elements; None: not recorded, see `statistics`
        self._update: tuple[Tensor, int] | None = None
        # the observer does not refer to the optimizer, so that deleting that removes the hooks
        self._observer = Observer(chosen, method, fisher, lambda name: fishers[name].make_sums())
        self._closing = weakref.finalize(self, self._observer.__exit__)
        self._closing.atexit = False
        self._arm()

    def distribute(
        self, group: Any = None, *, reduce: str | None = None, timeout: float = TIMEOUT
    ) -> None:
        """Share statistics with the processes of a group, by default all; call it on all of them.

        Gradients are averaged by DDP or by you. `timeout`: seconds that a process waits for others.
        `reduce`: how output sides travel, None: as they are kept. "covariance": sums of g̃g̃ᵀ are
        added up; "gather": all ranks have all g̃; "gram": so too, and each multiplies its share of
        the outputs for UᵀU; up to t_max/2 gradients a step they give the same steps. "none":
        nothing is shared, to compare.
        """
        if reduce not in REDUCTIONS:
            names = ", ".join(map(repr, REDUCTIONS))
            raise ValueError(f"NaturalGradient: reduce must be one of {names}, got {reduce!r}")
        if self.state or self.param_groups[0]["steps"]:
            raise RuntimeError(
                "NaturalGradient: distribute() must come before the first step, and before a state "
                "is loaded; make the optimizer anew"
            )
        if reduce == "none":
            self._warned = True
            return
        self.ranks, self._shares_gram = ranks_of(group, timeout), reduce == "gram"
        rows, fishers = None if reduce is None else reduce != "covariance", self._fishers
        self._observer.make_sums = lambda name: fishers[name].make_sums(rows)
        self._observer.forget()

    def _arm(self) -> None:
        """Register hooks if the next step observes; other steps have none, and no cost."""
        self._observer.__exit__()
        if self._observes():
            bases = {name: fisher.bases() for name, fisher in self._fishers.items()}
            self._observer.bases = {name: pair for name, pair in bases.items() if pair is not None}
            self._observer.register()

    def _observes(self) -> bool:
        """Whether this step observes the layers."""
        group = self.param_groups[0]
        return self._closing.alive and group["steps"] % group["statistics_every"] == 0

    def close(self) -> None:
        """Remove the hooks from the model; the curvature no longer changes."""
        self._observer.forget()
        self._closing()

    def observe(self, outputs: Tensor, targets: Tensor | None = None) -> None:
        """Observe layers with labels from the model itself; call it before the backward pass.

        For fisher="sampled" and "exact". Does nothing in steps that do not observe, and writes no
        `.grad`. `targets` only say which terms `loss` ignores.
        """
        if self.fisher == "empirical":
            raise RuntimeError(
                "observe() is for fisher='sampled' and 'exact'; the empirical Fisher is observed "
                "in your own backward pass"
            )
        if not self._observes():
            return
        shape = outputs.shape[:-1]
        weights = torch.ones(shape, device=outputs.device)
        if targets is not None:
            weights = self.loss.weights(targets).to(outputs.device).reshape(shape)
        # other labels in every pass and on every rank, and the same ones after a resume
        rank = self.ranks.rank if self.ranks else 0
        mixed = self.param_groups[0]["steps"] * 0x9E3779B97F4A7C15
        mixed += self._draws * 0xD1B54A32D192ED03 + rank * 0x2545F491
        generator = torch.Generator().manual_seed(mixed % 2**63)
        self._draws += 1
        self._observer.observe(outputs, self.loss, weights, generator)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_adamw"):
            raise RuntimeError(
                "NaturalGradient has all parameters of its model and takes no other group; make it "
                "anew from the larger model"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what was observed while they were computed."""
        super().zero_grad(set_to_none)
        self._observer.forget()
        self._scaler_scale = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step reads this first; False lets it unscale gradients of parameters."""
        # Gradients of outputs keep its scale, which it passes on only to optimizers that unscale
        # by themselves, and not after `unscale_`. So it is read from the caller's frame.
        scaler = sys._getframe(1).f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler):
            self._scaler_scale = scaler.get_scale()
            self._observer.stale = True
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` clears the gradients, computes the loss and calls backward()."""
        group, loss = self.param_groups[0], None
        refuse_after_error(self)
        group["lr"] = plain(group["lr"])
        check_arguments({**self._arguments, **group})
        check_shown(self.state, self._shown)
        if closure is None and self._is_asked_for_state():
            return None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._warn_of_ranks()
        with full_precision():
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        """A step with the gradients and the observations there are."""
        check_shapes("NaturalGradient", group, self._shapes, self.state)
        idle = all(p.grad is None for g in self.param_groups for p in g["params"])
        observed = {} if idle else self._observer.take()
        for name in list(observed):
            if not (self._fishers[name].state or self._learns(name)):  # frozen after its first pass
                del observed[name]
        self._draws = 0
        skip, everyone = self._agree(observed)
        self._make_state()
        if skip is not None:
            self.skipped_steps += 1
            logger.warning("skipped a step: %s", skip)
        if skip is not None or idle:
            return
        with noting_errors(self):
            # a factor set by hand is the whole factor, a scaler's included
            scale, self._scaler_scale = self._scaler_scale, None
            by_hand, reduction = float(self.loss_scale), group["reduction"]
            scale = by_hand if scale is None or by_hand != 1.0 else scale
            reduction = reduction if self.fisher == "empirical" else None
            layers = self._fishers, self._params
            for fisher, means, terms, places in layer_means(
                *layers, observed, everyone, reduction, scale, self.ranks
            ):
                fisher.fold_(means, terms, places, group["factor_beta"])
            failed = refresh_(self._fishers.values(), group, self.ranks, self._shares_gram)
            self.failed_refreshes += failed
            update = write_(*layers, group, self.ranks, self._update is not None)
            if update is not None:
                self._expected, self._update = update.expected, update.size
            if self._adamw is not None:
                self._adamw.step()
        group["steps"] += 1
        self._show()
        self._arm()

    def _agree(self, observed: Observed) -> tuple[str | None, list[list[float]]]:
        """Why to skip this step, and the loss terms of every rank by layer. Nothing has changed."""
        terms = {name: count for name, (_, count) in observed.items()}
        with together(self.ranks, "NaturalGradient.step"):  # all ranks raise where one does
            self._check_observed(observed)
            sums = {name: part for name, (part, _) in observed.items()}
            skip = find_problem(self.param_groups, sums)
        if self.ranks is None:
            return skip, [list(terms.values())]
        layers = {name: fisher.layer for name, fisher in self._fishers.items()}
        return compare_ranks(self.ranks, self.param_groups, layers, terms, skip)

    def _check_observed(self, observed: Observed) -> None:
        """Raise if a layer has a gradient but was never observed."""
        if self._closing.alive and not self._observes():
            return  # a layer that was unfrozen in between waits for the next observation
        remedy = "make passes in training mode and call the layer itself"
        if self.fisher != "empirical":
            remedy = "call optimizer.observe(outputs) before the backward pass"
        for name, fisher in self._fishers.items():
            used = any(param.grad is not None for param in self._params[name].values())
            if used and name not in observed and not fisher.has_statistics:
                raise RuntimeError(
                    f"layer {name!r} has a gradient, but no pass of it was observed; {remedy}, or "
                    "name in `layers` only others"
                )

    def update_damping(self, before: float, after: float, omega: float = 0.95) -> Damping:
        """Adapt λ by Levenberg–Marquardt, and return it: λ ← ωλ if ρ > ¾, λ/ω if ρ < ¼.

        ρ = (after − before) / (½δᵀHδ + ∇ᵀδ), with the losses of the last step's batch before and
        after it. Steps of AdamW and weight decay are not in the model. With ranks, all call it,
        each with its own losses, of which the mean counts, or the sum for reduction="sum".
        """
        if self._expected is None:
            raise RuntimeError("update_damping needs a step before it; call step() first")
        group, expected = self.param_groups[0], float(self._expected)
        if self.ranks is not None:
            losses = torch.tensor([before, after], dtype=torch.float64, device=self.ranks.device)
            before, after = self.ranks.all_reduce_(losses).tolist()
            parts = 1 if group["reduction"] == "sum" else self.ranks.size
            before, after = before / parts, after / parts
        change = before - after if group["maximize"] else after - before
        ratio = change / expected if expected < 0 else 0.5
        damping: Damping = adapted(group["damping"], ratio, omega)
        group["damping"] = damping
        return damping

    def report(self) -> CurvatureReport:
        """One record a layer: terms, columns, λ, κ before and after, clipped share, bytes.

        `print` shows a table, `json_lines()` is for a run's log.
        """
        group = self.param_groups[0]
        damping = group["damping"], group["max_condition"]
        return CurvatureReport(fisher.record(*damping) for fisher in self._fishers.values())

    @torch.no_grad()
    def statistics(self) -> list[Statistics]:
        """The numbers of `Preconditioned.statistics`, for the layers and for AdamW's group.

        The update is νV, the condition numbers are of H = F + λI of every layer, lifted by
        `max_condition`. All ranks have the same numbers without asking each other.
        """
        group, fishers = self.param_groups[0], self._fishers.values()
        limit = min(group["max_condition"] or MOST_CONDITION, MOST_CONDITION)
        conditions = [
            min(condition_number(fisher.eigenvalues(group["damping"])), limit)
            for fisher in fishers
            if fisher.has_inverse
        ]
        refreshes = sum(float(fisher.state.get("refreshes", 0)) for fisher in fishers)
        size = sum(v.nbytes for f in fishers for k, v in f.state.items() if k not in COUNTS)
        square, elements = self._update or (0.0, 0)
        if self._update is None:
            self._update = torch.zeros((), device="cpu"), 0
        counts = (elements, elements, refreshes + self.failed_refreshes, self.failed_refreshes)
        layers = summary(0, group, True, (float(square), 0, 0, 0, *counts, size), conditions)
        groups = [layers, *(self._adamw.statistics() if self._adamw is not None else [])]
        return [
            {**numbers, "name": n} for n, numbers in zip(("layers", "adamw"), groups, strict=False)
        ]

    def _show(self) -> None:
        """Put the states of layers and of AdamW into `self.state`."""
        self.state.update(layer_entries(self._fishers, self._params))
        if self._adamw is not None:
            self.state.update(self._adamw.state)
        self._shown = {param: (entry, dict(entry)) for param, entry in self.state.items()}

    def _learns(self, name: str) -> bool:
        return any(param.requires_grad for param in self._params[name].values())

    def _make_state(self) -> None:
        """Make the state of all trained layers that have none."""
        for name, fisher in self._fishers.items():
            params = list(self._params[name].values())
            if fisher.state:
                fisher.widen_(params[0])
            elif self._learns(name):
                fisher.make_(params[0], self.param_groups[0]["momentum"])

    def _is_asked_for_state(self) -> bool:
        """Whether torch.distributed.checkpoint calls step() only to make the state to load into.

        It does so before any other step and without a pass, with lr and all gradients 0.
        """
        if self.state or self._observer.terms or not asks_for_state(self.param_groups):
            return False
        self._make_state()
        if self._adamw is not None:
            self._adamw.step()  # which finds the same
        self._show()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Flat keys and plain tensors, the same on all ranks. Take it after a step."""
        refuse_after_error(self)
        packed = super().state_dict()
        packed["param_groups"] = saved_groups(packed["param_groups"])
        if self._adamw is not None:
            add_adamw_(packed, self._adamw)
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state dict, to the bit; settings of groups come from it too."""
        who, current = type(self).__name__, self.param_groups
        state_dict = checked(who, state_dict, current, set(self.defaults))
        if problem := not_finite(who, state_dict, current):
            raise ValueError(problem)
        groups, state = state_dict["param_groups"], state_dict["state"]
        groups[0] = {key: saved_value(value) for key, value in groups[0].items()}
        check_same(current[0], groups[0])
        check_arguments(self._arguments | groups[0])
        keys = dict(zip(current[0]["params"], groups[0]["params"], strict=True))
        before = {name: (fisher.state, fisher.method) for name, fisher in self._fishers.items()}
        methods = self._observer.fold.methods
        try:
            for name, fisher in self._fishers.items():
                fisher.method = methods[name] = groups[0]["method"]
            load_layers_(self._fishers, self._params, state, keys)
            if self._adamw is not None:
                load_adamw_(self._adamw, state, groups[1])
        except Exception:
            for name, (old, method) in before.items():
                self._fishers[name].state, self._fishers[name].method = old, method
                methods[name] = method
            raise
        current[0].update({k: v for k, v in groups[0].items() if k != "params"})
        if self._adamw is not None:
            current[1] = self._adamw.param_groups[0]
        self._observer.forget()
        self.state.clear()
        self._show()
        self._arm()
        self.step_error = ""

    def __getstate__(self) -> dict[str, Any]:
        # without the ranks, which belong to this process
        names = ("loss_scale", "skipped_steps", "failed_refreshes")
        counters = {name: getattr(self, name) for name in names}
        return {"arguments": self._arguments, "state_dict": self.state_dict(), "counters": counters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["arguments"])  # type: ignore[misc]
        self.load_state_dict(state["state_dict"])
        self.__dict__.update(state["counters"])

    def _warn_of_ranks(self) -> None:
        if self.ranks is None and not self._warned and (count := process_count()) > 1:
            warnings.warn(
                f"NaturalGradient: {count} ranks do not share what their layers see, so that equal "
                "models drift apart; call optimizer.distribute() before the first step",
                stacklevel=4,
            )
        self._warned = True
