"""The engine every optimizer runs on.

Observations are folded into statistics, statistics become an operator, and the operator is
applied to a gradient. An optimizer overrides what is its own (`init_state`, `observe`, `refresh`,
`direction`); cutting parameters into blocks and stacking equal ones, missing gradients, the first
moment, grafting, weight decay, cadence, checks and checkpoints are the same for all and live here.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from isokron.optim import checkpoint
from isokron.optim.blocks import Batch, Row, is_matrix
from isokron.optim.checks import check_gradients, nonfinite_names, surely_finite
from isokron.optim.grafting import graft, graft_direction
from isokron.optim.groups import (
    SHARED,
    check_group,
    check_param,
    check_spelling,
    learning_rate,
    param_name,
)
from isokron.optim.moments import first_moment_
from isokron.optim.plan import Plan, Shown, build_plan

logger = logging.getLogger(__name__)

# (parameter, number of its part) → the part, and its copy in an order that blocks can be cut from
Copies = dict[tuple[Tensor, int], tuple[Tensor, Tensor]]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Preconditioned(torch.optim.Optimizer):
    """Blocks of parameters, stepped along a preconditioned first moment.

    As it stands the preconditioner is the identity (gradient descent with momentum). Matrices get
    the method; vectors, scalars and groups with route="adamw" get AdamW.
    """

    order: ClassVar[int | None] = None  # merge dimensions until blocks have so many
    debias: ClassVar[bool] = True  # False where, but for grafting, the moment's scale is ignored

    def __init__(self, params: Params, lr: float | Tensor, **settings: Any) -> None:
        if isinstance(params, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes parameters, got a module; write "
                f"{type(self).__name__}(isokron.param_groups(model)) or pass model.parameters()"
            )
        self._plans: list[Plan] = []
        self._shown: Shown | None = None
        self.skipped_steps = 0
        super().__init__(params, {**SHARED, "lr": lr, **settings})

    # What an optimizer is made of. `grad` and `moment`: [B, ...], read-only.

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The method's state for a batch of B blocks: tensors [B, ...] under plain names."""
        return {}

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        """Fold a gradient into the statistics, in place."""

    def refresh(self, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        """Make the statistics an operator, in place. Called for the rows that are due."""

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        """Apply the operator. `state["step"]` broadcasts over the batch."""
        return moment

    def takes(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the method steps this parameter; what it does not take goes to AdamW."""
        return group["route"] == "auto" and is_matrix(param.shape, group["stacked"])

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
        if not self._gradients_fit():
            return loss
        for group, plan in zip(self.param_groups, self._current_plans(), strict=True):
            copies: Copies = {}
            for batch in plan.batches:
                self._step_batch(batch, group, copies)
            for part, copy in copies.values():
                part.copy_(copy.view(part.shape))
            parted = [fused.step_(group) for fused in plan.fused]
            if any(parted):
                self._show(plan)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Flat keys and plain tensors; loads with weights_only=True."""
        if self._plans:
            self._current_plans()
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
        return {**super().__getstate__(), "skipped_steps": self.skipped_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, by copying and by torch's load_state_dict."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no group here has a use for it
        self._plans, self._shown = [], None
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
            if not grads or surely_finite(grads):
                continue
            names = ", ".join(nonfinite_names(groups))
            if not names:
                continue
            if mode == "raise":
                raise FloatingPointError(
                    f"{type(self).__name__}: non-finite gradient of parameter {names}; nothing "
                    "was changed. Clip or unscale gradients before the step, or pass "
                    'nonfinite="skip"'
                )
            self.skipped_steps += 1
            logger.warning("skipped a step: non-finite gradient of parameter %s", names)
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
            plan = build_plan(group, self.takes, self.order, self.state)
            for batch in plan.batches:
                batch.state = self._full_state(batch, group)
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

    def _full_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state = {}
        if group["momentum"] > 0:
            state["momentum"] = batch.zeros()
        if group["graft"] not in (None, "sgd"):
            state["graft"] = batch.zeros()
        return {**state, **self.init_state(batch, group)}

    def _step_batch(self, batch: Batch, group: Mapping[str, Any], copies: Copies) -> None:
        present = batch.present()
        if not present:
            return
        whole = len(present) == len(batch.rows)
        at = None if whole else torch.tensor(present)
        state = batch.select(at)
        batch.step[slice(None) if at is None else at] += 1
        step = batch.step if at is None else batch.step[at]
        state["step"] = step.to(batch.device).view(-1, *[1] * len(batch.shape))

        rows = [batch.rows[i] for i in present]
        grad = batch.stack([row.param.grad for row in rows if row.param.grad is not None], rows)
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] and group["decay"] == "l2":
            weights = batch.stack([row.param for row in rows], rows)
            grad = grad.add(weights, alpha=group["weight_decay"])
        update = self._advance(grad, state, step, group)
        batch.put_(state, at)

        blocks = [_writable(row, copies) for row in rows]
        lr = learning_rate(group)
        if group["weight_decay"] and group["decay"] == "decoupled":
            torch._foreach_mul_(blocks, 1 - lr * group["weight_decay"])
        if isinstance(lr, Tensor):
            update, lr = update * lr, 1.0
        torch._foreach_sub_(blocks, update.unbind(), alpha=lr)

    def _advance(
        self, grad: Tensor, state: dict[str, Tensor], step: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        """Observe, refresh what is due, and return the update. [B, ...]"""
        self.observe(grad, state, group)
        moment = grad
        if group["momentum"] > 0:
            counted = state["step"] if self.debias or group["graft"] else None
            moment = first_moment_(
                state["momentum"], grad, group["momentum"], group["nesterov"], counted
            )
        every, start = group["every"], group["start"] or group["every"]
        due = ((step % every == 0) & (step > start)) | (step == start)
        if due.all():
            self.refresh(state, group)
        elif due.any():
            at = due.nonzero().squeeze(1).to(grad.device)
            some = {key: value[at] for key, value in state.items()}
            self.refresh(some, group)
            for key, value in state.items():
                value[at] = some[key]
        update = self.direction(moment, state, group)
        if group["graft"] is None:
            return update
        simple = graft_direction(grad, moment, state, group)
        update = graft(update, simple)
        # until its first refresh the method knows nothing: the grafted one steps alone
        return torch.where(state["step"] < start, simple, update) if start > 1 else update


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
