"""The engine of all optimizers: blocks of parameters stepped along a preconditioned moment.

Observations are folded into statistics, statistics become an operator, and the operator is applied
to a gradient. An optimizer overrides what is its own (`init_state`, `observe`, `refresh`,
`direction`, and `directions` where blocks of a layer depend on each other); blocks, missing
gradients, moments, grafting, weight decay, averages, checks and checkpoints are the engine's.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import hypot
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler's would load the compiler now

from isokron.distributed import (
    TIMEOUT,
    StepAgreement,
    check_communication,
    is_receiver,
    is_sharded,
    partial_state,
    ranks_of,
)
from isokron.linalg import on_host, sent
from isokron.linalg.device_transfer import as_tensor
from isokron.linalg.precision import full_precision
from isokron.optim import checkpoint
from isokron.optim.blocks import Batch, BatchStep, Copies, write_back
from isokron.optim.checkpoint_header import format_of
from isokron.optim.flat_buffer import FlatList
from isokron.optim.gradient_checks import (
    check_shapes,
    check_sums,
    check_types,
    gradient_sums,
    noting_errors,
    refuse_after_error,
)
from isokron.optim.group_checks import check_changes_, check_params, check_settings_
from isokron.optim.layout import GroupLayout, Traits, build_layout, matrices_of
from isokron.optim.lr_transfer import check_multiples, scale_by_width_, scale_from_adamw_
from isokron.optim.moments import (
    beta3_ratio,
    counted,
    first_moment_,
    graft,
    graft_direction,
    heavy_ball_,
    state_formats,
)
from isokron.optim.param_groups import warn_of_tables
from isokron.optim.refresh import Refresher, is_early, rows_where, wait
from isokron.optim.settings import (
    SHARED,
    added_decay,
    check_settings,
    check_spelling,
    follow_cycle_,
    note_peak_,
    refresh_delay,
    require,
    without_switches,
)
from isokron.optim.spectral import spectral_direction
from isokron.optim.statistics import Recorder, Statistics, statistics

logger = logging.getLogger(__name__)

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
State = dict[str, Tensor]
Group = Mapping[str, Any]


class Preconditioned(torch.optim.Optimizer):
    """Blocks of parameters, stepped along a preconditioned first moment.

    As it stands the preconditioner is the identity (gradient descent with momentum). Matrices get
    the method; vectors, scalars and groups with route="adamw" get AdamW.

    Args:
        params: parameters, named parameters or groups; `isokron.param_groups(model)` makes groups.
        lr: learning rate.
        traits: how the engine treats the method.
        **settings: defaults of the groups, see docs/engine.md. torch's `fused` and `foreach` are
            taken by all optimizers, and ignored.
    """

    # the name in checkpoints, of a subclass whose state is that of another class
    checkpoint_as: ClassVar[str | None] = None
    _recorder: Recorder | None = None  # made by the first call of `statistics`
    # by consolidate_state_dict: the state of all ranks, or {} where another rank has it
    _consolidated: dict[int, Any] | None = None
    step_error = ""

    @without_switches
    def __init__(
        self, params: Params, lr: float | Tensor, traits: Traits | None = None, **settings: Any
    ) -> None:
        if isinstance(params, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes parameters, got a module; write "
                f"{type(self).__name__}(isokron.param_groups(model))"
            )
        check_settings(type(self), settings)
        self.traits = traits or Traits()
        self.skipped_steps = 0
        self._layouts: list[GroupLayout] = []
        self._shown: tuple[list[dict[str, Tensor]], list[Tensor]] = [], []
        self._agreement = StepAgreement()
        self._refresher = Refresher()
        super().__init__(params, {**SHARED, "format": format_of(type(self)), "lr": lr, **settings})

    # What an optimizer is made of. `grad` and `moment`: [B, ...], read-only.

    def init_state(self, batch: Batch, group: Group) -> State:
        """The method's state for a batch of B blocks: tensors [B, ...] under plain names."""
        return {}

    def observe(self, grad: Tensor, state: State, group: Group) -> None:
        """Fold a gradient into the statistics, in place."""

    def refresh(self, state: State, group: Group, first: bool) -> State:
        """Statistics → operator, as new tensors [B, ...] under their names in the state.

        Called for the rows that are due, perhaps on another thread. `first`: for rows that still
        have the operator of `init_state`. A row that cannot be done is returned as NaN and keeps
        the operator it has.
        """
        return {}

    def install(self, operator: State, state: State, group: Group) -> None:
        """Replace the operator of rows by a refreshed one, in place."""
        for key, value in operator.items():
            state[key].copy_(value)

    def direction(self, moment: Tensor, state: State, group: Group) -> Tensor:
        """Apply the operator. `state["step"]` broadcasts over the batch."""
        return moment

    def directions(self, steps: Sequence[BatchStep], group: Group) -> None:
        """Find `step.direction` of batches that have been observed.

        Overridden where blocks of a layer depend on each other: `steps` then has all of them.
        """
        for step in steps:
            step.direction = self._direction(step, group)

    # A step, from top to bottom.

    @_disable_dynamo  # finding blocks and what is due is Python's business
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        refuse_after_error(self)
        new = closure is None and not self.state
        if new and checkpoint.asks_for_state(self.param_groups, self._agreement):
            self._current_layouts()
            return None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(group["mode"] == "eval" for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__}: parameters are averages for evaluation; call "
                "optimizer.train() before the forward pass of a step"
            )
        with full_precision():
            if self._is_shared():
                problem = self._agreement.agreed(self.param_groups, self._check_step)
            else:
                problem = self._check_step()
            if problem:
                self.skipped_steps += 1
                logger.warning("skipped a step: %s", problem)
            else:
                self.step_checked()
        return loss

    @torch.no_grad()
    def step_checked(self) -> None:
        """A step whose gradients are known to be usable."""
        self._consolidated = None
        if self._recorder is not None:
            self._recorder.begin_step()
        layouts = self._current_layouts()
        with noting_errors(self):
            for group, layout in zip(self.param_groups, layouts, strict=True):
                self._step_group(layout, group)

    def _step_group(self, layout: GroupLayout, group: dict[str, Any]) -> None:
        note_peak_(group)
        if not self.traits.heavy_ball:
            follow_cycle_(group)
        before = layout.averages.before() if layout.averages else []
        self._step_blocks(layout, group)
        moved = [params.step_(group) for params in layout.adamw]
        if layout.averages:
            layout.averages.after_(before, group)
        if any(moved):  # AdamW's state is in other tensors now
            self._show(layout)

    def _check_step(self) -> str | None:
        """Raise if no step can be made, or say why to skip this one; None to take it.

        It reads the outcomes of the last refreshes too: the one time a step waits for a device.
        """
        optimizer, groups, refresher = type(self).__name__, self.param_groups, self._refresher
        check_types(optimizer, groups)
        sums = gradient_sums(groups)
        norms = self._agreement.norms(groups) if self._agreement.ranks else []
        outcomes = [outcome.flags for outcome in refresher.unread]
        values = on_host([*sums, *norms, *outcomes])
        lengths = values[len(sums) : len(sums) + len(norms)]
        self._agreement.length = hypot(*(length for of_device in lengths for length in of_device))
        refresher.read_outcomes(optimizer, values[len(sums) + len(norms) :])
        refresher.raise_error()
        return check_sums(optimizer, groups, self._squares, values[: len(sums)])

    def _squares(self, param: Tensor, group: Group) -> bool:
        """Whether a second moment, of the method, of grafting or of AdamW, squares a gradient."""
        squares = self.traits.squares or group["graft"] not in (None, "sgd")
        return squares or not self.traits.takes(param, group)

    def _step_blocks(self, layout: GroupLayout, group: Group) -> None:
        """One step of all that the method takes, a wave of batches at a time."""
        copies: Copies = {}
        sending: list[BatchStep] = []
        self._request(layout.waves[:1], group)
        for i, wave in enumerate(layout.waves):
            self._request(layout.waves[i + 1 : i + 2], group)  # travels while this wave is found
            steps = [step for batch in wave if (step := self._observe(batch, group)) is not None]
            self.directions([step for step in steps if step.views], group)
            for step in steps:
                self._finish(step, group)
                sending.append(step)
                if step.arriving is None or len(sending) > 1:
                    sending.pop(0).write_(group, copies)
        for step in sending:
            step.write_(group, copies)
        write_back(copies)

    def _request(self, waves: Sequence[Sequence[Batch]], group: Group) -> None:
        """Start to bring gradients of blocks to their owners."""
        weights = bool(added_decay(group, "l2") or added_decay(group, "momentum"))
        for batch in (batch for wave in waves for batch in wave):
            if batch.exchange is not None:
                batch.exchange.request(weights)

    def _observe(self, batch: Batch, group: Group) -> BatchStep | None:
        """Fold the gradients of the rows that have one into the statistics."""
        views = batch.present()
        if not views:
            return _step_of_others(batch)
        rows = batch.row_numbers(views)
        index = None if rows is batch.all_rows else sent(rows, batch.device)
        state = batch.read_state(index)
        batch.step[slice(None) if index is None else rows] += 1
        count = batch.step if index is None else batch.step[rows]
        wide = torch.promote_types(batch.dtype, torch.float32)
        state["step"] = sent(count.to(wide), batch.device).view(-1, *[1] * len(batch.shape))
        grad = batch.gradients(views)
        if group["maximize"]:
            grad = -grad
        if added := added_decay(group, "l2"):
            grad = grad.add(batch.weights(views), alpha=added)
        if group["route"] != "spectral":
            self.observe(grad, state, group)
        return BatchStep(batch, views, rows, index, state, grad)

    def _direction(self, step: BatchStep, group: Group) -> Tensor:
        """Refresh what is due, apply the operator, and graft. [B, ...]"""
        grad, state, spectral = step.grad, step.state, group["route"] == "spectral"
        kept, moment = None if spectral else self.traits.moment, grad
        if "momentum" in state:
            beta = self._beta(group)
            ratio = beta if group["nesterov"] else 1.0
            ratio = beta3_ratio(group) if self.traits.heavy_ball else ratio
            # grafting needs the moment's scale, whatever the method does with it
            count = counted(state, group) if self.traits.debias or group["graft"] else None
            moment = first_moment_(state["momentum"], grad, beta, ratio, count)
        if spectral:
            direction = spectral_direction(moment, group["scale"])
        else:
            if step.batch.refreshes:
                self._refresher.run(self, step.batch, step.rows, state, group)
            direction = self.direction(grad if kept else moment, state, group)
            if group["polar"]:
                direction = spectral_direction(direction, group["scale"])
        simple: Tensor | None = None
        if group["graft"]:
            if kept is not None and "momentum" not in state:
                moment = kept(grad, state, group)
            simple = graft_direction(grad, moment, state, group)
            direction = graft(direction, simple)
            if not spectral:
                # before its first refresh the method knows nothing: the grafted one steps alone
                turns = step.batch.turns(step.rows)
                if is_early(int(turns.min()), group):
                    alone = sent(rows_where(is_early, turns, group), grad.device)
                    direction = torch.where(alone.view_as(state["step"]), simple, direction)
        if self._recorder is not None:  # Adam's direction, or what Katie divides to get it
            state["adam"] = simple if simple is not None and group["graft"] == "adam" else moment
        return direction

    def _finish(self, step: BatchStep, group: Group) -> None:
        """Momentum on the update; the state goes back, and directions travel to who writes them."""
        if step.views:
            if added := added_decay(group, "momentum"):
                step.direction = step.direction.add(step.batch.weights(step.views), alpha=added)
            if "velocity" in step.state:
                step.direction = heavy_ball_(step.state["velocity"], step.direction, group)
            if self._recorder is not None:
                self._recorder.record(step, group)
            step.store_state_()
        if step.batch.exchange is not None:
            step.arriving = step.batch.exchange.send(step.direction)

    # Layouts: which parameter is in which batch, and the state that `optimizer.state` shows.

    def _current_layouts(self, loading: bool = False) -> list[GroupLayout]:
        """A layout for every group, made anew where parameters or settings have changed."""
        del self._layouts[len(self.param_groups) :]
        optimizer, shown = type(self).__name__, self._is_shown()
        for i, group in enumerate(self.param_groups):
            layout = self._layouts[i] if i < len(self._layouts) else None
            if not shown and layout is not None and not layout.is_shown(self.state):
                # what was deleted from the state starts afresh, and what was replaced counts
                checkpoint.check_keys(layout, self.state, group, optimizer)
                layout = None
            if layout is None or not (checked := _has_values(layout, group)):
                check_changes_(optimizer, group, self.traits, layout)
            if layout is not None and _holds(layout, group, checked):
                continue
            self._join()
            if i < len(self._layouts):
                old = self._layouts[i]
                shapes = dict(zip(old.params, old.forms.shapes, strict=True))
                check_shapes(optimizer, group, shapes, self.state)
            layout = self.new_layout(group, self._layouts[i - 1].loads if i else None)
            if loading:
                checkpoint.check_keys(layout, self.state, group, optimizer)
            checkpoint.load_(layout, self.state, group, optimizer)
            self._layouts[i : i + 1] = [layout]
            self._show(layout)
        if not shown:
            self._note_shown()
        return self._layouts

    def _is_shown(self) -> bool:
        """Whether `optimizer.state` is as it was left: its entries, and the tensors in them."""
        # in their order, because to look tensors up takes as long as to step small ones
        entries, tensors = self._shown
        same = len(self.state) == len(entries) and all(map(is_, self.state.values(), entries))
        return same and all(map(is_, chain.from_iterable(map(dict.values, entries)), tensors))

    def _note_shown(self) -> None:
        entries = list(self.state.values())
        self._shown = entries, list(chain.from_iterable(map(dict.values, entries)))

    def new_layout(self, group: Group, loads: Any) -> GroupLayout:
        spectral = group["route"] == "spectral"  # polar factors are of whole matrices
        whole = {**group, "max_dim": None}
        layout = build_layout(
            group,
            takes=self.traits.takes,
            cut=(lambda shape, _: matrices_of(shape, whole)) if spectral else self.traits.cut,
            agreement=self._agreement,
            has_state=lambda param: bool(self.state.get(param)),
            # decompositions need float32, whatever state_dtype says
            min_dtype=torch.float32 if self._refreshes() else None,
            by_layer=type(self).directions is not Preconditioned.directions,
            work=self.work(group),
            keys=self.defaults,
            loads=loads,
        )
        for batch in layout.batches:
            state = batch.state
            batch.refreshes = self._refreshes() and not spectral
            # a moment that the method keeps in its basis is kept twice for grafting, which saves
            # products, unless memory is dear
            twice = group["graft"] and group["moments"] is None
            if self._beta(group) > 0 and (spectral or self.traits.moment is None or twice):
                state["momentum"] = batch.zeros()
            if self.traits.heavy_ball and group["momentum"] > 0:
                state["velocity"] = batch.zeros()
            if group["graft"] not in (None, "sgd"):
                state["graft"] = batch.zeros()
            if not spectral:
                state.update(self.init_state(batch, group))
            formats = state_formats(state, batch.shape, group)
            if refresh_delay(group):
                operator = [key for key in state if key.split(".")[0] in self.traits.operator]
                batch.coming = {
                    key: torch.zeros_like(
                        state[key], dtype=torch.bfloat16 if key in formats else None
                    )
                    for key in operator
                }
            batch.compress_(formats)
        return layout

    def _show(self, layout: GroupLayout) -> None:
        """Let `optimizer.state` be the tensors that steps work on."""
        self.state.update(layout.show())

    def _join(self) -> None:
        """Wait for every refresh that has begun."""
        wait([batch for layout in self._layouts for batch in layout.batches])

    def _settle(self) -> None:
        """Let `optimizer.state` be complete: wait for refreshes, and read what they have done."""
        if self._layouts:
            self._current_layouts()
        self._join()
        self._read_outcomes()
        for layout in self._layouts:
            self._show(layout)

    def _read_outcomes(self) -> None:
        """Read what finished refreshes have done, before the next step does."""
        unread = [outcome.flags for outcome in self._refresher.unread]
        self._refresher.read_outcomes(type(self).__name__, on_host(unread))

    def work(self, group: Group) -> str:
        """How the directions of a group are found: "eigen", "products" or "polar"."""
        return "polar" if group["route"] == "spectral" else self.traits.work

    def _refreshes(self) -> bool:
        return type(self).refresh is not Preconditioned.refresh

    def _beta(self, group: Group) -> float:
        """The first moment's rate."""
        beta: float = group["betas"][0] if self.traits.heavy_ball else group["momentum"]
        return beta

    def _is_shared(self) -> bool:
        """Whether ranks share any parameter; all plain tensors are told by their types alone."""
        if self._agreement.ranks is not None:
            return True
        types = {type(param) for group in self.param_groups for param in group["params"]}
        return not types <= {Tensor, nn.Parameter} and self._agreement.active(self.param_groups)

    # The contract of torch.optim, and what else users call.

    @property
    def failed_refreshes(self) -> int:
        """How many refreshes have failed and left their blocks the operators they had."""
        self._settle()
        return self._refresher.failed

    @torch.no_grad()
    def statistics(self) -> list[Statistics]:
        """Numbers that show whether the optimizer is healthy, one dict per group.

        The first call turns on recording: what is known of steps only is None until the next one.
        Where ranks share parameters all must call it, and all get the numbers of one process.
        See docs/statistics.md for how each number is measured and which values are healthy.

        Returns:
            Per parameter group:
                name: of the group; without one, its number.
                lr: the group's learning rate.
                update_rms: root mean square of P in W ← W − lr·(P + λW), in the last step.
                adam_cosine: cosine between P and Adam's direction M̂ ⊘ (√V̂ + ε), over the blocks
                    of the method; 1 where AdamW steps all; None if the method keeps no V.
                condition_max, condition_median: over blocks, the condition number of the factors
                    that are inverted, from below; None for a method without factors.
                refreshes: of blocks, since this optimizer was made or has loaded a state.
                failed_share: the share of them that failed.
                state_bytes: of the state on all ranks, without step counters.
        """
        self._recorder = self._recorder or Recorder()
        self._read_outcomes()
        return statistics(self.param_groups, self._layouts, self._recorder)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at any time; the batches of the others stay as they are."""
        optimizer = type(self).__name__
        check_spelling(
            optimizer, param_group, [*self.defaults, "name", "initial_lr", "match_adamw"]
        )
        check_multiples(optimizer, param_group)
        # a copy: torch writes into it, and the caller may make another optimizer of the same groups
        super().add_param_group({**param_group, "format": format_of(type(self))})
        self._consolidated = None
        group = self.param_groups[-1]
        try:
            check_settings_(optimizer, group, self.traits)
            if "match_adamw" in group:
                rule = "True or False; the learning rate itself is `lr`"
                require(
                    isinstance(group["match_adamw"], bool), optimizer, group, "match_adamw", rule
                )
                if group.pop("match_adamw"):
                    scale_from_adamw_(group, self.traits)
            if "fans" in group:
                scale_by_width_(group, self.traits)
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError(
                    f"{optimizer}: a parameter is in a group twice and would be stepped twice; "
                    "pass it once"
                )
            check_params(optimizer, group, self.traits)
        except Exception:
            self.param_groups.pop()
            raise
        warn_of_tables(self, group)

    def distribute(
        self,
        group: Any = None,
        *,
        communication_dtype: torch.dtype | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """Divide work and state over ranks that step the same parameters with the same gradients.

        Call it on all of them before the first step (DDP). Sharded parameters (FSDP2) are divided
        over the ranks of their mesh in any case; for them this sets the rest. See
        docs/distributed.md.

        Args:
            group: the process group, by default all processes.
            communication_dtype: in which blocks travel; None for their own.
            timeout: seconds that a process waits for others.
        """
        if self.state:
            raise RuntimeError(
                f"{type(self).__name__}: distribute() must come before the first step, and before "
                "a state is loaded; make the optimizer anew"
            )
        check_communication(type(self).__name__, communication_dtype)
        self._agreement = StepAgreement(ranks_of(group, timeout), communication_dtype, timeout)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; those of a `flat` group become zero where they are."""
        super().zero_grad(set_to_none)
        for layout in self._layouts:
            for params in layout.adamw:
                if isinstance(params, FlatList):
                    params.zero_grad_()

    def train(self) -> None:
        """With averaging: let parameters be the point where gradients are taken."""
        self._set_mode("train")

    def eval(self) -> None:
        """With averaging: let parameters be the average, to evaluate or to save them."""
        self._set_mode("eval")

    @torch.no_grad()
    def _set_mode(self, mode: str) -> None:
        if not any(group["average"] or group["mode"] == "eval" for group in self.param_groups):
            return
        for group, layout in zip(self.param_groups, self._current_layouts(), strict=True):
            if layout.averages and group["mode"] != mode:
                layout.averages.show_(mode, group)
                self._consolidated = None
            group["mode"] = mode if layout.averages else "train"

    def state_dict(self) -> dict[str, Any]:
        """Flat keys and tensors; loads with weights_only=True.

        Where ranks share parameters all must call it: their state is DTensors, which
        torch.distributed.checkpoint saves and reshards; `full_state_dict` makes them plain.
        After `consolidate_state_dict` it is local.
        """
        packed = self._packed()
        if self._consolidated is not None:
            packed["state"] = self._consolidated or packed["state"]
            return packed if self._consolidated else partial_state(packed)
        batches = [batch for layout in self._layouts for batch in layout.batches]
        blocks = any(batch.exchange is not None for batch in batches)
        # AdamW's state of sharded parameters is sharded as they are: nothing to exchange
        if not self.state or not (blocks or self._agreement.ranks):
            return packed
        self._agree_on_state({})
        numbers = self._numbers()
        for param, key, value in checkpoint.sharded_entries(self._layouts):
            packed["state"][numbers[param]][key] = value
        # sorted: ranks have found their own blocks first, and torch gathers key by key
        packed["state"] = {i: dict(sorted(entry.items())) for i, entry in packed["state"].items()}
        return partial_state(packed)

    def full_state_dict(self, to_rank: int | None = None) -> dict[str, Any]:
        """The state dict that one process would have, with plain tensors.

        Where ranks share parameters all must call it. All get it, or only the global rank
        `to_rank`; the others get {}. A batch of blocks is gathered at a time.
        """
        receives, packed, numbers = is_receiver(to_rank), self._packed(), self._numbers()
        if self.state and self._is_shared():
            self._agree_on_state({"to_rank": to_rank})
            for param, key, value in checkpoint.full_entries(self._layouts):
                if receives:
                    packed["state"][numbers[param]][key] = value.clone()
        for entry in packed["state"].values():
            for key in sorted(key for key, value in entry.items() if is_sharded(value)):
                value = entry.pop(key).full_tensor()
                if receives:
                    entry[key] = value
        return packed if receives else {}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Until the next step, let `state_dict()` on the global rank `to` be that of one process.

        All ranks must call it, as with torch's ZeroRedundancyOptimizer: for trainers that call
        `state_dict()` on one rank alone. That rank keeps a copy of the state of all until then.
        """
        if self.state and self._is_shared():
            self._consolidated = self.full_state_dict(to).get("state", {})

    def _packed(self) -> dict[str, Any]:
        """torch's state dict of what this process has, in the order of parameters."""
        refuse_after_error(self)
        self._settle()
        packed = super().state_dict()
        # batch by batch the order would differ from rank to rank; and parameters that share a step
        # counter here must not in an optimizer that counts each
        packed["state"] = {
            index: {
                **{key: checkpoint.with_own_bytes(value) for key, value in entry.items()},
                "step": as_tensor(entry["step"]).clone(),
            }
            for index, entry in sorted(packed["state"].items())
        }
        packed["param_groups"] = checkpoint.saved_groups(packed["param_groups"])
        return packed

    def _agree_on_state(self, arguments: Mapping[str, Any]) -> None:
        """Raise on all ranks unless they have the same state and were called alike."""
        facts = checkpoint.state_facts(
            type(self).__name__, self.param_groups, self._layouts, self._agreement.members
        )
        shared = {members: [*arguments.items(), *about] for members, about in facts.items()}
        remedy = (
            "every rank has a part of the state, so all call it; to save on one rank, call "
            "optimizer.full_state_dict(to_rank=0) on all, or in a trainer that calls state_dict() "
            "on rank 0 alone first optimizer.consolidate_state_dict() on all"
        )
        self._agreement.agree(shared, "optimizer.state_dict()", remedy)

    def _numbers(self) -> dict[Tensor, int]:
        """The number of each parameter in a state dict."""
        params = (param for group in self.param_groups for param in group["params"])
        return {param: number for number, param in enumerate(params)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state dict, to the bit; half-precision parameters keep float32 state."""
        self._join()
        self._consolidated = None
        with checkpoint.loading(self):
            super().load_state_dict(dict(state_dict))
        self.step_error = ""

    def __getstate__(self) -> dict[str, Any]:
        if self._is_shared():
            raise RuntimeError(
                f"{type(self).__name__}: a copy of one process's part of an optimizer is of no "
                "use; call optimizer.full_state_dict() on all ranks, or save it by "
                "torch.distributed.checkpoint"
            )
        self._settle()
        copied = {"skipped_steps": self.skipped_steps, "traits": self.traits}
        return {**super().__getstate__(), **copied, "_failed": self.failed_refreshes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, by copying and by torch's load_state_dict."""
        failed = state.pop("_failed", None)
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no group here has a use for it
        self._layouts, self._shown = [], ([], [])
        if failed is not None:  # a copy; a loaded state leaves the counts as they are
            self._refresher = Refresher(failed)
            self._agreement = StepAgreement()
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            check_settings_(type(self).__name__, group, self.traits)
            check_params(type(self).__name__, group, self.traits)
        loading = checkpoint.unshield(self.state)
        if self.state:
            self._current_layouts(loading)


# in this file, because every step asks


def _has_values(layout: GroupLayout, group: Group) -> bool:
    """Whether no setting was assigned since they were checked."""
    return all(map(is_, map(group.get, layout.values), layout.values.values()))


def _holds(layout: GroupLayout, group: Group, same_values: bool) -> bool:
    """Whether it was made for this group as it is and has all that take part now."""
    params = group["params"]
    return (
        len(layout.params) == len(params)
        and all(map(is_, layout.params, params))
        and layout.forms.hold(params)
        and (same_values or layout.fits(group))
        and all(param.grad is None for param in layout.idle)
    )


def _step_of_others(batch: Batch) -> BatchStep | None:
    """The step of a batch whose present blocks other ranks own; None if none is present."""
    if batch.exchange is None or not batch.exchange.present:
        return None
    batch.exchange.discard()
    empty = torch.empty(0, *batch.shape, dtype=batch.dtype, device=batch.device)
    return BatchStep(batch, direction=empty)
