"""One plan a group, kept as long as it holds, and the state that `optimizer.state` shows."""

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isokron.distributed import Sharing
from isokron.optim import checkpoint
from isokron.optim.blocks import Batch
from isokron.optim.cadence import refresh_delay
from isokron.optim.plan import Plan, State, build_plan
from isokron.optim.refreshing import wait

if TYPE_CHECKING:
    from isokron.optim.engine import Preconditioned


class Plans:
    """The plans of an optimizer's groups, in their order."""

    def __init__(self) -> None:
        self.made: list[Plan] = []
        self._shown: Shown | None = None

    def current(
        self, method: "Preconditioned", sharing: Sharing, loading: bool = False
    ) -> list[Plan]:
        """Plans, made anew where a group, its settings or its state were changed."""
        groups, who = method.param_groups, type(method).__name__
        del self.made[len(groups) :]
        if self._shown is not None and not self._shown.still(method.state):
            self.join()
            self.made = []
        for i, group in enumerate(groups):
            if i < len(self.made) and self.made[i].holds(group):
                continue
            self.join()
            plan = build_plan(
                group,
                method.takes,
                method.cut,
                method.state,
                method.shaping,
                # decompositions need float32, whatever state_dtype says
                torch.float32 if method.operator else None,
                sharing,
                self.made[i - 1].loads if i else None,
                together(method),
                method.work(group),
            )
            for batch in plan.batches:
                batch.state = full_state(method, batch, group)
                if refresh_delay(group):
                    batch.coming = operator_copy(method, batch)
            if loading:
                checkpoint.check_keys(plan, method.state, group, who)
            initial = [
                operator_copy(method, batch)
                if any(method.state.get(row.param) for row in batch.rows)
                else {}
                for batch in plan.batches
            ]
            checkpoint.adopt(plan, method.state, group, who)
            for batch, operator in zip(plan.batches, initial, strict=True):
                for key, value in operator.items():
                    differs = (value != batch.state[key]).reshape(len(value), -1).any(1)
                    batch.refreshed |= differs.cpu()
            self.made[i : i + 1] = [plan]
            self.show_(plan, method.state)
        return self.made

    def show_(self, plan: Plan, state: State) -> None:
        """Let `optimizer.state` be the plan's state."""
        state.update(plan.entries())
        self._shown = Shown(state)

    def join(self) -> None:
        """Wait for every refresh that has begun, so that `optimizer.state` is whole."""
        wait([batch for plan in self.made for batch in plan.batches])


def full_state(
    method: "Preconditioned", batch: Batch, group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What is kept of a batch: the engine's part and the method's."""
    state = {}
    spectral = group["route"] == "spectral"
    if method.beta(group) > 0 and (spectral or not method.keeps_moment or group["graft"]):
        state["momentum"] = batch.zeros()
    if method.heavy_ball and group["momentum"] > 0:
        state["velocity"] = batch.zeros()
    if group["graft"] not in (None, "sgd"):
        state["graft"] = batch.zeros()
    return state if spectral else {**state, **method.init_state(batch, group)}


def operator_copy(method: "Preconditioned", batch: Batch) -> dict[str, Tensor]:
    """What a refresh of the method replaces."""
    return {
        key: value.clone()
        for key, value in batch.state.items()
        if key.split(".")[0] in method.operator
    }


def together(method: "Preconditioned") -> str:
    """Which blocks one process must have, where several share the work."""
    return "part" if method.settles else "block"


class Shown:
    """What stands in `optimizer.state`, to notice when somebody has put something else there."""

    def __init__(self, state: State) -> None:
        self.entries = list(state.values())
        self.values = list(self._values())

    def still(self, state: State) -> bool:
        return (
            len(state) == len(self.entries)
            and all(map(is_, state.values(), self.entries))
            and all(map(is_, self._values(), self.values))
        )

    def _values(self) -> Iterator[Any]:
        """All values and then an end, which no longer or shorter row of values agrees with."""
        return chain(chain.from_iterable(map(dict.values, self.entries)), (Shown,))
