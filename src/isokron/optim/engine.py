"""The engine every optimizer runs on.

Observations are folded into statistics, statistics become an operator, and the operator is
applied to a gradient. An optimizer overrides what is its own (`init_state`, `observe`, `refresh`,
`direction`); cutting parameters into blocks and stacking equal ones, missing gradients, the first
moment, grafting, weight decay, cadence, averages, checks and checkpoints are the same for all.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from isokron.optim import checkpoint
from isokron.optim.blocks import Batch, Row, is_matrix
from isokron.optim.cadence import due, landing, unready
from isokron.optim.checks import check_gradients, surely_finite, wrong_gradients
from isokron.optim.grafting import graft, graft_direction, rescale_
from isokron.optim.groups import (
    check_group,
    check_param,
    check_settings,
    check_spelling,
    decay_rate,
    learning_rate,
    note_peak_,
    param_name,
)
from isokron.optim.moments import filtered_, first_moment_, heavy_ball_
from isokron.optim.plan import Plan, Shown, build_plan
from isokron.optim.refreshing import Worker, settled
from isokron.optim.settings import SHARED
from isokron.optim.spectral import spectral_direction

logger = logging.getLogger(__name__)

# (parameter, number of its part) → the part, and its copy in an order that blocks can be cut from
Copies = dict[tuple[Tensor, int], tuple[Tensor, Tensor]]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass
class Stepping:
    """What is known of a batch in the middle of a step; `at`: its rows that step, None for all."""

    batch: Batch
    at: Tensor | None
    rows: list[Row]
    state: dict[str, Tensor]
    update: Tensor
    simple: Tensor | None  # the grafted method's direction


class Preconditioned(torch.optim.Optimizer):
    """Blocks of parameters, stepped along a preconditioned first moment.

    As it stands the preconditioner is the identity (gradient descent with momentum). Matrices get
    the method; vectors, scalars and groups with route="adamw" get AdamW.
    """

    order: ClassVar[int | None] = None  # merge dimensions until blocks have so many
    debias: ClassVar[bool] = True  # False where, but for grafting, the moment's scale is ignored
    operator: ClassVar[tuple[str, ...]] = ()  # state that `refresh` makes: names, or up to a dot
    shaping: ClassVar[tuple[str, ...]] = ()  # own settings on which the form of the state depends
    # True: the first moment's rate is betas[0], and `momentum` acts on the update
    heavy_ball: ClassVar[bool] = False
    # True: the method keeps the first moment itself, in a space of its own; `direction` gets the
    # gradient, and the engine keeps a moment only for grafting
    keeps_moment: ClassVar[bool] = False
    squares: ClassVar[bool] = False  # True: statistics hold squares, which must not overflow

    def __init__(self, params: Params, lr: float | Tensor, **settings: Any) -> None:
        if isinstance(params, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes parameters, got a module; write "
                f"{type(self).__name__}(isokron.param_groups(model)) or pass model.parameters()"
            )
        check_settings(type(self), settings)
        self._plans: list[Plan] = []
        self._shown: Shown | None = None
        self._worker: Worker | None = None
        self.skipped_steps = 0
        self.failed_refreshes = 0
        super().__init__(params, {**SHARED, "lr": lr, **settings})

    # What an optimizer is made of. `grad` and `moment`: [B, ...], read-only.

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The method's state for a batch of B blocks: tensors [B, ...] under plain names."""
        return {}

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        """Fold a gradient into the statistics, in place."""

    def refresh(self, state: dict[str, Tensor], group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Statistics → operator, as new tensors [B, ...] under their names in `operator`.

        Called for the rows that are due, perhaps on another thread. A row that cannot be done is
        returned as NaN: it keeps the operator it has.
        """
        return {}

    def install(
        self, fresh: dict[str, Tensor], state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        """Let the refreshed operator be the one that counts, in place."""
        for key, value in fresh.items():
            state[key].copy_(value)

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        """Apply the operator. `state["step"]` broadcasts over the batch."""
        return moment

    def takes(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the method steps this parameter; what it does not take goes to AdamW."""
        if group["route"] == "adamw":
            return False
        vector = group["vectors"] and group["route"] == "auto" and param.numel() > 1
        return vector or is_matrix(param.shape, group["stacked"])

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError for settings of the method's own that cannot be right."""

    # The contract of torch.optim.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at any time; the batches of the others stay as they are."""
        known = [*self.defaults, "name", "initial_lr"]
        check_spelling(type(self).__name__, param_group, known)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()  # groups that share it would all scale it in turn
        try:
            check_group(type(self).__name__, group)
            self.check(group)
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError(
                    f"{type(self).__name__}: a parameter is in a group twice and would be "
                    "stepped twice; pass it once"
                )
            for i, param in enumerate(group["params"]):
                check_param(type(self).__name__, param_name(group, i), param, group)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(group["mode"] == "eval" for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__}: parameters are averages for evaluation; call "
                "optimizer.train() before the forward pass of a step"
            )
        if not self._gradients_fit():
            return loss
        for group, plan in zip(self.param_groups, self._current_plans(), strict=True):
            note_peak_(group)
            before = plan.averages.before() if plan.averages else []
            self._step_blocks(plan, group)
            parted = [fused.step_(group) for fused in plan.fused]
            if plan.averages:
                plan.averages.after_(before, group)
            if any(parted):
                self._show(plan)
        return loss

    def train(self) -> None:
        """With averaging: let parameters be the point where gradients are taken."""
        self._show_mode("train")

    def eval(self) -> None:
        """With averaging: let parameters be the average, to evaluate or to save them."""
        self._show_mode("eval")

    @torch.no_grad()
    def _show_mode(self, mode: str) -> None:
        averaging = [group["average"] is not None for group in self.param_groups]
        plans = self._current_plans() if any(averaging) else []
        for group, plan in zip(self.param_groups, plans, strict=False):
            if plan.averages and group["mode"] != mode:
                plan.averages.show_(mode, group)
                group["mode"] = mode

    def state_dict(self) -> dict[str, Any]:
        """Flat keys and plain tensors; loads with weights_only=True."""
        if self._plans:
            self._current_plans()
        self._join()
        packed = super().state_dict()
        # parameters that share a counter here must not in an optimizer that counts each by itself
        packed["state"] = {
            index: {**entry, "step": torch.as_tensor(entry["step"]).clone()}
            for index, entry in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state dict, to the bit; half-precision parameters keep float32 state."""
        # Registered last, so that it runs after the user's own hooks.
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
        self._join()
        counts = ("skipped_steps", "failed_refreshes")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in counts}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, by copying and by torch's load_state_dict."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no group here has a use for it
        self._plans, self._shown, self._worker = [], None, None
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        loading = checkpoint.unshield(self.state)
        if self.state:
            self._current_plans(loading)

    # One step, piece by piece.

    def _gradients_fit(self) -> bool:
        """Whether to step at all; raises before any state has changed."""
        for group in self.param_groups:
            check_gradients(type(self).__name__, group)
        for mode in ("raise", "skip"):
            groups = [group for group in self.param_groups if group["nonfinite"] == mode]
            grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            if not grads or surely_finite(grads, self.squares):
                continue
            wrong = wrong_gradients(groups, self.squares)
            if not wrong:
                continue
            if mode == "raise":
                raise FloatingPointError(
                    f"{type(self).__name__}: {wrong}; nothing was changed. Clip or unscale "
                    'gradients before the step, or pass nonfinite="skip"'
                )
            self.skipped_steps += 1
            logger.warning("skipped a step: %s", wrong)
            return False
        return True

    def _current_plans(self, loading: bool = False) -> list[Plan]:
        """One plan a group, made anew where the group, its settings or its state were changed."""
        del self._plans[len(self.param_groups) :]
        if self._shown is not None and not self._shown.still(self.state):
            self._plans = []
        for i, group in enumerate(self.param_groups):
            if i < len(self._plans) and self._plans[i].holds(group):
                continue
            self._join()
            plan = build_plan(group, self.takes, self.order, self.state, self.shaping)
            for batch in plan.batches:
                batch.state = self._full_state(batch, group)
                if group["delay"]:
                    made = [key for key in batch.state if key.split(".")[0] in self.operator]
                    batch.coming = {key: batch.state[key].clone() for key in made}
            if loading:
                checkpoint.check_keys(plan, self.state, group, type(self).__name__)
            checkpoint.adopt(plan, self.state, group, type(self).__name__)
            self._plans[i : i + 1] = [plan]
            self._show(plan)
        return self._plans

    def _show(self, plan: Plan) -> None:
        """Let `optimizer.state` be the plan's state."""
        self.state.update(plan.entries())
        self._shown = Shown(self.state)

    def _join(self) -> None:
        """Wait for every refresh that has begun, so that `optimizer.state` is whole."""
        for batch in (batch for plan in self._plans for batch in plan.batches):
            for job in batch.jobs.values():
                job.result()

    def _full_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state = {}
        spectral = group["route"] == "spectral"
        if self._beta(group) > 0 and (spectral or not self.keeps_moment or group["graft"]):
            state["momentum"] = batch.zeros()
        if self.heavy_ball and group["momentum"] > 0:
            state["velocity"] = batch.zeros()
        if group["graft"] not in (None, "sgd"):
            state["graft"] = batch.zeros()
        return state if spectral else {**state, **self.init_state(batch, group)}

    def _beta(self, group: Mapping[str, Any]) -> float:
        """The first moment's rate."""
        return group["betas"][0] if self.heavy_ball else group["momentum"]

    def _step_blocks(self, plan: Plan, group: Mapping[str, Any]) -> None:
        copies: Copies = {}
        held: list[Stepping] = []
        for batch in plan.batches:
            stepping = self._step_batch(batch, group)
            if stepping is None:
                continue
            if group["graft"] and group["graft_by"] == "parameter":
                held.append(stepping)
            else:
                self._write(stepping, group, copies)
        if held:
            number = {param: i for i, param in enumerate(plan.params)}
            owners = [torch.tensor([number[row.param] for row in one.rows]) for one in held]
            simple = [one.simple for one in held if one.simple is not None]
            rescale_([one.update for one in held], simple, owners)
        for stepping in held:
            self._write(stepping, group, copies)
        for part, copy in copies.values():
            part.copy_(copy.view(part.shape))

    def _step_batch(self, batch: Batch, group: Mapping[str, Any]) -> Stepping | None:
        """Observe, refresh what is due, and find the update. [B, ...]"""
        present = batch.present()
        if not present:
            return None
        at = None if len(present) == len(batch.rows) else torch.tensor(present)
        state = batch.select(at)
        batch.step[slice(None) if at is None else at] += 1
        step = batch.step if at is None else batch.step[at]
        wide = torch.promote_types(batch.dtype, torch.float32)
        state["step"] = step.to(batch.device, wide).view(-1, *[1] * len(batch.shape))

        rows = [batch.rows[i] for i in present]
        grad = batch.stack([row.param.grad for row in rows if row.param.grad is not None], rows)
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] and group["decay"] == "l2":
            weights = batch.stack([row.param for row in rows], rows)
            grad = grad.add(weights, alpha=group["weight_decay"])
        if group["route"] == "spectral":
            moment = self._moment(grad, state, group)
            update = spectral_direction(moment)
        else:
            self.observe(grad, state, group)
            moment = self._moment(grad, state, group)
            self._refresh(batch, present, state, group)
            update = self.direction(grad if self.keeps_moment else moment, state, group)
        simple = None
        if group["graft"]:
            simple = graft_direction(grad, moment, state, group)
            if group["graft_by"] == "block":
                update = graft(update, simple)
            if group["route"] != "spectral":
                # until its first refresh the method knows nothing: the grafted one steps alone
                turns = [(int(batch.step[row]), batch.phase[row]) for row in present]
                early = [unready(*turn, group) for turn in turns]
                if any(early):
                    alone = torch.tensor(early, device=grad.device).view_as(state["step"])
                    update = torch.where(alone, simple, update)
        return Stepping(batch, at, rows, state, update, simple)

    def _moment(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        """The first moment as the method or the grafted one wants it; `grad` where none is kept."""
        if "momentum" not in state:
            return grad
        beta, beta3 = self._beta(group), group["beta3"]
        if self.heavy_ball and beta3 is not None:
            return filtered_(state["momentum"], grad, beta, beta3, state["step"])
        counted = state["step"] if self.debias or group["graft"] else None
        ahead = group["nesterov"] and not self.heavy_ball
        return first_moment_(state["momentum"], grad, beta, ahead, counted)

    def _refresh(
        self, batch: Batch, present: list[int], state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        """Refresh the rows that are due now, or begin to and install what was begun earlier."""
        if not self.operator:
            return
        turns = [(i, int(batch.step[row]), batch.phase[row]) for i, row in enumerate(present)]
        if group["delay"]:
            ready = [i for i, step, phase in turns if landing(step, phase, group)]
            if ready:
                fresh, failed = Worker.end(batch, [present[i] for i in ready])
                self._install(batch, present, ready, fresh, failed, state, group)
        now = [i for i, step, phase in turns if due(step, phase, group)]
        if not now:
            return
        some = state if len(now) == len(present) else {k: v[now] for k, v in state.items()}
        if group["delay"]:
            settings = dict(group)
            self._worker = self._worker or Worker()
            self._worker.begin(
                batch, [present[i] for i in now], some, lambda s: self.refresh(s, settings)
            )
            return
        fresh, failed = settled(lambda s: self.refresh(s, group), some)
        self._install(batch, present, now, fresh, failed, state, group)

    def _install(
        self,
        batch: Batch,
        present: list[int],
        at: list[int],
        fresh: dict[str, Tensor],
        failed: list[bool],
        state: dict[str, Tensor],
        group: Mapping[str, Any],
    ) -> None:
        """Install new operators of the rows present[at], and count those that failed."""
        for i, bad in zip(at, failed, strict=True):
            row = present[i]
            batch.failures[row] = batch.failures[row] + 1 if bad else 0
            if bad:
                self._note_failure(batch.rows[row], batch.failures[row], group)
        if len(at) == len(present):
            self.install(fresh, state, group)
            return
        some = {key: value[at] for key, value in state.items()}
        self.install(fresh, some, group)
        for key, value in state.items():
            value[at] = some[key]

    def _note_failure(self, row: Row, times: int, group: Mapping[str, Any]) -> None:
        index = next(i for i, param in enumerate(group["params"]) if param is row.param)
        name = f"parameter {param_name(group, index)} (block {row.number})"
        self.failed_refreshes += 1
        logger.warning("refresh of %s failed, it keeps the operator it has", name)
        if times > group["tolerated"]:
            raise FloatingPointError(
                f"{type(self).__name__}: more than tolerated={group['tolerated']} refreshes in a "
                f"row failed for {name}; raise `damping` or `eps`, lower the learning rate, or "
                "give the parameter a group with route='adamw'"
            )

    def _write(self, stepping: Stepping, group: Mapping[str, Any], copies: Copies) -> None:
        """W ← W(1 − lr·λ) − lr·P, and the state back to where it lives."""
        update = stepping.update
        if "velocity" in stepping.state:
            update = heavy_ball_(stepping.state["velocity"], update, group)
        stepping.batch.put_(stepping.state, stepping.at)
        blocks = [_writable(row, copies) for row in stepping.rows]
        lr, rate = learning_rate(group), decay_rate(group)
        if rate:
            torch._foreach_mul_(blocks, 1 - lr * rate)
        if isinstance(lr, Tensor):
            update, lr = update * lr, 1.0
        torch._foreach_sub_(blocks, update.unbind(), alpha=lr)


def _writable(row: Row, copies: Copies) -> Tensor:
    """The row's block as a view to write into: of the parameter, or of a copy kept for the step."""
    block = row.block
    try:
        return block.view(row.param)
    except RuntimeError:  # strides that do not merge, such as channels_last
        part = row.param[block.index]
        key = (row.param, block.part)
        _, copy = copies.setdefault(key, (part, part.reshape(block.merged)))
        return copy[block.cut]
