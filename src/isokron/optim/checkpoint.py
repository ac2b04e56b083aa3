"""State that is taken over as it is: no casts, no reordering, errors that name the key."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import fill_
from isokron.optim.groups import param_name
from isokron.optim.plan import Plan


class _Kept:
    """A value hidden from torch's loader, which would cast it to its parameter's dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value


@contextmanager
def taking_over(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While torch loads a state: it comes as it was saved, or all stays as it is.

    The hook is registered last, so that it runs after the user's own.
    """
    handle = optimizer.register_load_state_dict_pre_hook(shield)
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        yield
    except Exception:
        optimizer.__setstate__(before)
        raise
    finally:
        handle.remove()


def shield(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A load_state_dict pre-hook: hide state from casting, keep settings the checkpoint lacks."""
    hidden = {
        param: {key: _Kept(value) for key, value in entry.items()}
        for param, entry in state_dict["state"].items()
    }
    saved, mine = state_dict["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, mine)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{type(optimizer).__name__}: the checkpoint has groups of {sizes[0]} parameters, this "
            f"optimizer of {sizes[1]}; make it from the same model and groups, with or without "
            "isokron.param_groups and its overrides"
        )
    kept = [{k: v for k, v in group.items() if k != "params"} for group in mine]
    merged = [
        {**old, **{key: _meant(value) for key, value in new.items()}}
        for old, new in zip(kept, saved, strict=True)
    ]
    return {**state_dict, "state": hidden, "param_groups": merged}


def spelt(state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups with dtypes by name: what gathers a full state dict in torch knows no dtypes."""
    return [
        {
            key: str(value) if isinstance(value, torch.dtype) else value
            for key, value in each.items()
        }
        for each in state_dict["param_groups"]
    ]


def _meant(value: Any) -> Any:
    """Undo `spelt`."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def unshield(state: MutableMapping[Tensor, Any]) -> bool:
    """Undo `shield`; whether there was anything to undo."""
    kept = [param for param, entry in state.items() if _is_kept(entry)]
    for param in kept:
        state[param] = {key: value.value for key, value in state[param].items()}
    return bool(kept)


def _is_kept(entry: Mapping[str, Any]) -> bool:
    return any(isinstance(value, _Kept) for value in entry.values())


def adopt(plan: Plan, state: Mapping[Tensor, Any], group: Mapping[str, Any], who: str) -> None:
    """Copy what state there is into the plan's batches and lists; what is new starts afresh."""
    for _, where, saved, wanted in _pairs(plan, state, group, who):
        for key in set(saved) & set(wanted):
            shape = torch.as_tensor(saved[key]).shape
            if shape != wanted[key].shape:
                raise ValueError(
                    f"{where}: {key!r} has shape {tuple(shape)} in the state and "
                    f"{tuple(wanted[key].shape)} here; the blocks or the model differ"
                )
    for batch in plan.batches:
        for i, row in enumerate(batch.rows):
            saved = _own(state.get(row.param) or {}, adamw=False)
            batch.step[i] = float(saved.get("step", 0))
            for key, value in batch.stored().items():
                if f"{key}.{row.number}" in saved:
                    value[i].copy_(saved[f"{key}.{row.number}"])
                elif key.startswith("next."):  # nothing has begun: what is there goes on
                    value[i].copy_(batch.state[key.removeprefix("next.")][i])
        if batch.shared is not None:
            for i, row in enumerate(batch.shared.rows):
                saved = _own(state.get(row.param) or {}, adamw=False)
                batch.shared.step[i] = float(saved.get("step", 0))
    for fused in plan.fused:
        fused.adopt_([_own(state.get(param) or {}, adamw=True) for param in fused.params])
    if plan.averages is not None:
        for i, param in enumerate(plan.averages.params):
            saved = state.get(param) or {}
            for key, value in plan.averages.entry(i).items():
                if key in saved:
                    fill_(value, torch.as_tensor(saved[key]))


def _own(saved: Mapping[str, Any], adamw: bool) -> Mapping[str, Any]:
    """A parameter's state; none where it is another stepper's: counts go with what was counted."""
    others = any("." in key for key in saved) if adamw else "exp_avg" in saved
    return {} if others else saved


def check_keys(plan: Plan, state: Mapping[Tensor, Any], group: Mapping[str, Any], who: str) -> None:
    """Refuse a checkpoint of another optimizer, other settings or other blocks."""
    others = plan.elsewhere()
    for param, where, saved, wanted in _pairs(plan, state, group, who):
        differing = sorted((set(saved) ^ set(wanted)) - (others.get(param, set()) - set(wanted)))
        if differing:
            key = differing[0]
            lies = "missing from the checkpoint" if key in wanted else "not part of this state"
            raise ValueError(
                f"{where}: {key!r} is {lies} (the checkpoint has {', '.join(sorted(saved))}; this "
                f"optimizer {', '.join(sorted(wanted))}); load it into the optimizer, settings "
                "and model that saved it"
            )


def _pairs(
    plan: Plan, state: Mapping[Tensor, Any], group: Mapping[str, Any], who: str
) -> Iterator[tuple[Tensor, str, Mapping[str, Any], Mapping[str, Tensor]]]:
    """Per parameter that has state: itself, how an error calls it, its state, and the plan's."""
    wanted = plan.entries()
    for i, param in enumerate(group["params"]):
        if state.get(param) and param in wanted:
            where = f"{who}: state of parameter {param_name(group, i)}"
            yield param, where, state[param], wanted[param]
