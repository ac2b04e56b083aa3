"""AdamW of the parts of parameters that are this process's to step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import Place, fill_, gather_parts_, part_of, whole_from
from isokron.optim.fused import FusedList


class PartList:
    """A FusedList of what is here of sharded parameters, or of this rank's rows of whole ones,
    which go to the other ranks after each step.

    Its state is that of the whole parameters, as DTensors of which this rank has its part.
    """

    def __init__(
        self, params: Sequence[Tensor], places: Sequence[Place], dtype: torch.dtype, amsgrad: bool
    ) -> None:
        self.params, self.places = tuple(params), tuple(places)
        parts = [part_of(p.detach(), at) for p, at in zip(self.params, self.places, strict=True)]
        self.list = FusedList(parts, dtype, amsgrad)

    def row(self, i: int) -> dict[str, Tensor]:
        """The state of parameter i under the names torch.optim.AdamW gives it."""
        row = self.list.row(i)
        param, place = self.params[i], self.places[i]
        return {
            key: value if key == "step" else whole_from(value, param, place)
            for key, value in row.items()
        }

    def adopt_(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over what there is of a saved state, of whole parameters or of their parts."""
        self.list.adopt_([{"step": entry["step"]} if "step" in entry else {} for entry in saved])
        for i, entry in enumerate(saved):
            for key, value in self.row(i).items():
                if key in entry and key != "step":
                    fill_(value, entry[key])

    def step_(self, group: Mapping[str, Any]) -> bool:
        """One step; True if the state is in other tensors now."""
        present = []
        for param, place, part in zip(self.params, self.places, self.list.params, strict=True):
            mine = part_of(param.detach(), place)
            if mine.data_ptr() != part.data_ptr():  # somebody has given the parameter other memory
                part.data = mine
            part.grad = None if param.grad is None else part_of(param.grad, place).to(part.dtype)
            if param.grad is not None:
                present.append((param, place))
        parted = self.list.step_(group)
        for part in self.list.params:
            part.grad = None
        gather_parts_(present)
        return parted
