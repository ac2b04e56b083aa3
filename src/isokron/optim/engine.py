"""The engine every optimizer runs on.

Observations are folded into statistics, statistics become an operator, and the operator is
applied to a gradient. An optimizer overrides what is its own (`init_state`, `observe`, `refresh`,
`direction`); cutting parameters into blocks and stacking equal ones, missing gradients, the first
moment, grafting, weight decay, cadence, averages, checks and checkpoints are the same for all.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import hypot
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler's would load the compiler now

from isokron.distributed import (
    TIMEOUT,
    Sharing,
    asked_by_torch,
    check_communication,
    full_is_asked_for,
    is_receiver,
    partial_state,
    ranks_of,
)
from isokron.linalg import on_host
from isokron.optim import checkpoint
from isokron.optim.blocks import Batch, Block, Observed, cut_blocks
from isokron.optim.checks import check_kinds, check_sums, gradient_sums
from isokron.optim.full_state import full_state
from isokron.optim.groups import (
    check_adamw,
    check_group,
    check_method,
    check_param,
    check_settings,
    check_spelling,
    note_peak_,
    param_name,
)
from isokron.optim.plans import Plans
from isokron.optim.refreshing import Refresher
from isokron.optim.settings import SHARED
from isokron.optim.stepping import step_blocks
from isokron.optim.tables import check_route, gets_method, warn_of_tables
from isokron.optim.writing import Update

logger = logging.getLogger(__name__)

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


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
    elementwise: ClassVar[bool] = False  # True: a part is stepped as it would be in the whole
    refresh_work: ClassVar[str] = "eigen"  # or "products", "polar": see `block_cost`
    # True: directions are found for all batches before any is written, and `settle_` sees them
    settles: ClassVar[bool] = False

    def __init__(self, params: Params, lr: float | Tensor, **settings: Any) -> None:
        if isinstance(params, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes parameters, got a module; write "
                f"{type(self).__name__}(isokron.param_groups(model))"
            )
        check_settings(type(self), settings)
        self._plans = Plans()
        self._sharing = Sharing()
        self.refresher = Refresher()
        self.skipped_steps = 0
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

    def first_refresh(
        self, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """`refresh` of rows that still have the operator of `init_state`."""
        return self.refresh(state, group)

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

    def observed(self, batches: Iterable[Observed], group: Mapping[str, Any]) -> Iterable[Observed]:
        """Batches as they are observed; taken as a whole where what is seen of blocks depends on
        other blocks of their parameter, which have one owner where `settles` says so."""
        return batches

    def settle_(self, updates: Sequence[Update], group: Mapping[str, Any]) -> None:
        """What depends on several blocks of a parameter, done to their directions in place."""

    def cut(self, shape: Sequence[int], group: Mapping[str, Any]) -> list[Block]:
        """The blocks of a parameter that the method takes; polar factors are of whole matrices."""
        spectral = group["route"] == "spectral"
        return cut_blocks(
            shape,
            max_dim=None if spectral else group["max_dim"],
            order=2 if spectral else self.order,
            stacked=group["stacked"],
            split=group["split"],
            split_dim=group["split_dim"],
        )

    def takes(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the method steps this parameter; what it does not take goes to AdamW."""
        return gets_method(param, group)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError for settings of the method's own that cannot be right."""

    def work(self, group: Mapping[str, Any]) -> str:
        """How the directions of a group are found: "eigen", "products" or "polar"."""
        return "polar" if group["route"] == "spectral" else self.refresh_work

    def refreshes(self) -> bool:
        """Whether there is anything to refresh."""
        return type(self).refresh is not Preconditioned.refresh

    # The contract of torch.optim, and what else users call.

    @property
    def failed_refreshes(self) -> int:
        """How many refreshes have failed and left their blocks the operators they had."""
        refresher = self.refresher
        refresher.note(type(self).__name__, on_host([last.outcome for last in refresher.unread]))
        return refresher.failed

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at any time; the batches of the others stay as they are."""
        known = [*self.defaults, "name", "initial_lr"]
        check_spelling(type(self).__name__, param_group, known)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()  # groups that share it would all scale it in turn
        try:
            check_route(type(self).__name__, group)
            check_group(type(self).__name__, group, sums=self.heavy_ball)
            check_method(type(self), group)
            self.check(group)
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError(
                    f"{type(self).__name__}: a parameter is in a group twice and would be "
                    "stepped twice; pass it once"
                )
            parts = self.elementwise or group["route"] == "adamw"
            for i, param in enumerate(group["params"]):
                name = param_name(group, i)
                check_param(type(self).__name__, name, param, group, parts)
                if not self.takes(param, group):
                    check_adamw(type(self).__name__, name, group)
        except Exception:
            self.param_groups.pop()
            raise
        warn_of_tables(self, group)

    @_disable_dynamo  # finding blocks and what is due is Python's business
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
        unfit = self._sharing.agreed(self.param_groups, self._check_step)
        if unfit:
            self.skipped_steps += 1
            logger.warning("skipped a step: %s", unfit)
        else:
            self.step_checked()
        return loss

    @torch.no_grad()
    def step_checked(self) -> None:
        """A step whose gradients are known to be usable."""
        for group, plan in zip(
            self.param_groups, self._plans.current(self, self._sharing), strict=True
        ):
            note_peak_(group)
            before = plan.averages.before() if plan.averages else []
            step_blocks(self, plan, group)
            parted = [fused.step_(group) for fused in plan.fused]
            if plan.averages:
                plan.averages.after_(before, group)
            if any(parted):
                self._plans.show_(plan, self.state)

    def _check_step(self) -> str | None:
        """Raise if no step can be made, or say why to skip this one; None: step.

        It reads what the last refreshes have done too: the one time that a step waits for a device.
        """
        who, groups, unread = type(self).__name__, self.param_groups, self.refresher.unread
        check_kinds(who, groups)
        sums, norms = gradient_sums(groups, self.squares), self._sharing.norms(groups)
        values = on_host([*sums, *norms, *(last.outcome for last in unread)])
        lengths, outcomes = values[len(sums) :][: len(norms)], values[len(sums) + len(norms) :]
        self._sharing.length = hypot(*(length for several in lengths for length in several))
        self.refresher.note(who, outcomes)
        self.refresher.raise_error()
        return check_sums(who, groups, self.squares, values[: len(sums)])

    def distribute(
        self,
        group: Any = None,
        *,
        communication_dtype: torch.dtype | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """Divide work and state over the processes of a group, by default all, which step the same
        parameters with the same gradients (DDP). Call it on all of them before the first step.

        What is sharded (FSDP2) is divided over the ranks of its mesh in any case; for it this sets
        the rest. `communication_dtype`: in which blocks travel, None for their own. `timeout`:
        seconds that a process waits for others. See docs/distributed.md.
        """
        if self.state:
            raise RuntimeError(
                f"{type(self).__name__}: distribute() must come before the first step, and before "
                "a state is loaded; make the optimizer anew"
            )
        check_communication(type(self).__name__, communication_dtype)
        self._sharing = Sharing(ranks_of(group, timeout), communication_dtype, timeout)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those of a `flat` group become zero where they are."""
        super().zero_grad(set_to_none)
        for plan in self._plans.made:
            plan.zero_grads_()

    def train(self) -> None:
        """With averaging: let parameters be the point where gradients are taken."""
        self._show_mode("train")

    def eval(self) -> None:
        """With averaging: let parameters be the average, to evaluate or to save them."""
        self._show_mode("eval")

    @torch.no_grad()
    def _show_mode(self, mode: str) -> None:
        if not any(group["average"] or group["mode"] == "eval" for group in self.param_groups):
            return
        for group, plan in zip(
            self.param_groups, self._plans.current(self, self._sharing), strict=True
        ):
            if plan.averages and group["mode"] != mode:
                plan.averages.show_(mode, group)
            group["mode"] = mode if plan.averages else "train"

    def state_dict(self) -> dict[str, Any]:
        """Flat keys and plain tensors; loads with weights_only=True.

        Where blocks are divided over ranks it is this rank's part, which cannot be pickled: save it
        by torch.distributed.checkpoint, or save what `full_state_dict` gives.
        """
        if self._plans.made:
            self._plans.current(self, self._sharing)
        self._plans.join()
        packed = super().state_dict()
        # parameters that share a counter here must not in an optimizer that counts each by itself
        packed["state"] = {
            index: {**entry, "step": torch.as_tensor(entry["step"]).clone()}
            # a batch at a time, `state` is in another order on every rank
            for index, entry in sorted(packed["state"].items())
        }
        if asked_by_torch() is not None:
            packed["param_groups"] = checkpoint.spelt(packed)
        if not self._divides():
            return packed
        return self._completed(packed) if full_is_asked_for() else partial_state(packed)

    def _divides(self) -> bool:
        """Whether ranks have parts of the state that are not shards of their own parameters."""
        blocks = any(batch.shared for plan in self._plans.made for batch in plan.batches)
        parties = self._sharing.parties(self.param_groups)
        several = any(ranks.size > 1 for ranks in parties)
        return several and bool(self.state) and (blocks or self._sharing.ranks is not None)

    def full_state_dict(self, to_rank: int | None = None) -> dict[str, Any]:
        """The state of all blocks and of whole parameters, as one process would have it.

        Where work is divided, all ranks must call it. All get it, or `to_rank` alone, counted in
        all processes; the others get {}. Beside the result a rank needs memory for one bucket.
        """
        return self._completed(self.state_dict(), to_rank)

    def _completed(self, packed: Mapping[str, Any], to_rank: int | None = None) -> dict[str, Any]:
        receives = is_receiver(to_rank)
        who, groups, plans = type(self).__name__, self.param_groups, self._plans.made
        state = full_state(who, packed["state"], groups, plans, self._sharing, to_rank)
        return {**packed, "state": state} if receives else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state dict, to the bit; half-precision parameters keep float32 state."""
        self._plans.join()
        with checkpoint.taking_over(self):
            super().load_state_dict(dict(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        if self._sharing.active(self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__}: a copy of one process's part of an optimizer is of no "
                "use; call optimizer.full_state_dict() on all ranks, or save it by "
                "torch.distributed.checkpoint"
            )
        self._plans.join()
        counts = {"skipped_steps": self.skipped_steps, "_failed": self.failed_refreshes}
        return {**super().__getstate__(), **counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, by copying and by torch's load_state_dict."""
        failed = state.pop("_failed", None)
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no group here has a use for it
        self._plans = Plans()
        if failed is not None:  # a copy; a loaded state leaves the counts as they are
            self.refresher, self._sharing = Refresher(failed), Sharing()
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        loading = checkpoint.unshield(self.state)
        if self.state:
            self._plans.current(self, self._sharing, loading)

    def beta(self, group: Mapping[str, Any]) -> float:
        """The first moment's rate."""
        return group["betas"][0] if self.heavy_ball else group["momentum"]
