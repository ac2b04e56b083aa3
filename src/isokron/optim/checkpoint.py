"""State dicts that load as they were saved: no casts, no reordering, errors that name the key."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from isokron.optim.blocks import Batch
from isokron.optim.groups import param_name
from isokron.optim.plan import Plan


class _Kept:
    """A tensor hidden from torch's loader, which would cast it to its parameter's dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value


def shield(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A load_state_dict pre-hook: hide every value of the state from casting."""
    hidden = {
        param: {key: _Kept(value) for key, value in entry.items()}
        for param, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": hidden}


def unshield(state: MutableMapping[Tensor, Any]) -> None:
    for param, entry in list(state.items()):
        state[param] = {
            key: value.value if isinstance(value, _Kept) else value for key, value in entry.items()
        }


def adopt(
    plan: Plan, state: Mapping[Tensor, Any], group: Mapping[str, Any], optimizer: str
) -> None:
    """Copy a loaded state into the plan's batches and lists, after checking it fits."""
    where = {
        param: f"{optimizer}.load_state_dict: parameter {param_name(group, i)}"
        for i, param in enumerate(group["params"])
        if state.get(param)
    }
    for batch in plan.batches:
        for i, row in enumerate(batch.rows):
            if row.param in where:
                _adopt_row(batch, i, state[row.param], where[row.param])
    for fused in plan.fused:
        for i, param in enumerate(fused.params):
            if param in where:
                _check_fits(state[param], fused.row(i), where[param])
                fused.adopt_(i, state[param])
        fused.share_step_()


def _adopt_row(batch: Batch, i: int, saved: Mapping[str, Any], where: str) -> None:
    number = batch.rows[i].number
    wanted = {f"{key}.{number}": value[i] for key, value in batch.state.items()}
    mine = {key: value for key, value in saved.items() if key.endswith(f".{number}")}
    _check_fits({"step": saved.get("step"), **mine}, {"step": batch.step[i], **wanted}, where)
    batch.step[i] = float(saved["step"])
    for key, value in wanted.items():
        value.copy_(saved[key])


def _check_fits(saved: Mapping[str, Any], wanted: Mapping[str, Tensor], where: str) -> None:
    differing = sorted(set(saved) ^ set(wanted)) or (["step"] if saved.get("step") is None else [])
    if differing:
        key = differing[0]
        lies = "is missing from the checkpoint" if key in wanted else "is not part of this state"
        raise ValueError(
            f"{where}: {key!r} {lies} (checkpoint has {sorted(saved)}, this optimizer "
            f"{sorted(wanted)}); load it into the optimizer and settings that saved it"
        )
    for key, value in wanted.items():
        shape = torch.as_tensor(saved[key]).shape
        if shape != value.shape:
            raise ValueError(
                f"{where}: {key!r} has shape {tuple(shape)} in the checkpoint and "
                f"{tuple(value.shape)} here; the blocks or the model differ"
            )
