"""Which parameters of a group are blocks of which batch, and which go to AdamW."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from isokron.optim.blocks import Batch, Row, cut_blocks
from isokron.optim.fused import FusedList
from isokron.optim.groups import state_dtype

State = MutableMapping[Tensor, Any]


@dataclass(frozen=True)
class Plan:
    """One group's parameters, each in the rows of batches or in a list for AdamW.

    `idle`: frozen when the plan was made, and so without state, until they show a gradient.
    """

    params: list[Tensor]
    idle: list[Tensor]
    batches: list[Batch]
    fused: list[FusedList]

    def holds(self, params: list[Tensor]) -> bool:
        """Whether the plan was made for these parameters and has all that take part now."""
        same = len(self.params) == len(params) and all(map(is_, self.params, params))
        return same and all(param.grad is None for param in self.idle)

    def publish(self, state: State) -> None:
        """Show the batches' state as the optimizer's: flat keys, plain tensors, views of rows."""
        entries: dict[Tensor, dict[str, Tensor]] = {}
        for batch in self.batches:
            for i, row in enumerate(batch.rows):
                entry = entries.setdefault(row.param, {"step": batch.step[i]})
                entry.update({f"{key}.{row.number}": v[i] for key, v in batch.state.items()})
        state.update(entries)
        for fused in self.fused:
            self.publish_fused(fused, state)

    def publish_fused(self, fused: FusedList, state: State) -> None:
        for i, param in enumerate(fused.params):
            state[param] = fused.row(i)


def build_plan(
    group: Mapping[str, Any], takes: Callable[[Tensor, Mapping[str, Any]], bool], order: int | None
) -> Plan:
    """Batches of equal blocks of what the method takes, lists for AdamW of the rest."""
    rows: dict[tuple[Any, ...], list[Row]] = {}
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    idle: list[Tensor] = []
    for param in group["params"]:
        if param.numel() == 0:
            continue
        if not param.requires_grad and param.grad is None:
            idle.append(param)
            continue
        if not takes(param, group):
            lists.setdefault((param.device, param.dtype), []).append(param)
            continue
        blocks = cut_blocks(
            param.shape,
            max_dim=group["max_dim"],
            order=order,
            stacked=group["stacked"],
            split=group["split"],
            split_dim=group["split_dim"],
        )
        for number, block in enumerate(blocks):
            key = (block.shape, param.dtype, param.device)
            rows.setdefault(key, []).append(Row(param, block, number))
    batches = [Batch(equal, state_dtype(equal[0].param, group)) for equal in rows.values()]
    fused = [
        FusedList(params, state_dtype(params[0], group), group["amsgrad"])
        for params in lists.values()
    ]
    return Plan(list(group["params"]), idle, batches, fused)
