"""What a state dict says of itself: whose state it is, in which format, of which parameters.

Every group has the setting `format`, such as "SOAP 1". It is among the settings because they are
all that torch.distributed.checkpoint keeps beside the state.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import is_sharded, local
from isokron.linalg import on_host
from isokron.optim.settings import param_name
from isokron.optim.wrapped_models import WRAPPERS

Group = Mapping[str, Any]

FORMAT = 1  # raised when what is in a state dict changes, or what a setting means

# The state of torch's optimizers, by entries that it has.
OF_TORCH = {"exp_avg_sq": "torch.optim.AdamW or Adam", "momentum_buffer": "torch.optim.SGD or Muon"}


def format_of(optimizer: type) -> str:
    """`checkpoint_as`, by default the name of the class, and the format."""
    return f"{getattr(optimizer, 'checkpoint_as', None) or optimizer.__name__} {FORMAT}"


def checked(
    optimizer: str,
    state_dict: Mapping[str, Any],
    groups: Sequence[Group],
    settings: Collection[str],
) -> dict[str, Any]:
    """A state dict with its parameters in the order of these groups, where both have their names.

    Raises for the state of another optimizer or format, for other groups or names, and for settings
    that are missing.

    Args:
        optimizer: its name in errors.
        state_dict: as torch makes them, or torch.distributed.checkpoint with names for numbers.
        groups: of the optimizer that loads it.
        settings: what an optimizer's groups have; a default that was changed is in no checkpoint.
    """
    saved = state_dict["param_groups"]
    pairs = zip(saved, groups, strict=False)  # sizes are compared below
    of_torch = [_is_of_torch(optimizer, state_dict["state"], *pair) for pair in pairs]
    sizes = [[len(group["params"]) for group in part] for part in (saved, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{optimizer}: the checkpoint has groups of {sizes[0]} parameters, this optimizer of "
            f"{sizes[1]}; make it from the same model and groups, with the same "
            "layers frozen, and with or without isokron.param_groups and its overrides"
        )
    ordered: list[dict[str, Any]] = []
    for i, (group, current) in enumerate(zip(saved, groups, strict=True)):
        missing = sorted((settings & current.keys()) - group.keys())
        if missing and not of_torch[i]:
            raise ValueError(
                f"{optimizer}: group {i} of the checkpoint has no setting {missing[0]!r}; write "
                f"the value it was trained with into state_dict['param_groups'][{i}]"
            )
        # names stay those of this optimizer
        values = {key: value for key, value in group.items() if key != "param_names"}
        if "param_names" in current:
            values["param_names"] = current["param_names"]
        ordered.append({**values, "params": _in_order(optimizer, i, group, current)})
    return {**state_dict, "param_groups": ordered}


def _is_of_torch(optimizer: str, state: Mapping[Any, Any], saved: Group, current: Group) -> bool:
    """Whether it is torch's AdamW's, which isokron.AdamW takes; raises for all that is not its."""
    name, number = _parsed(saved.get("format"))
    own = _parsed(current["format"])[0]
    if name == own and number > FORMAT:
        raise ValueError(
            f"{optimizer}: the checkpoint has format {number} of {name}, and this isokron reads "
            f"formats up to {FORMAT}; load it with the isokron that saved it, or a newer one"
        )
    if name == own:
        return False
    entries = [state[key] for key in saved["params"] if state.get(key)]
    keys = sorted({str(key) for entry in entries for key in entry})
    of_adamw = set(keys) <= {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    if not name and own == "AdamW" and of_adamw:
        if saved.get("weight_decay") and not saved.get("decoupled_weight_decay", True):
            rule = f"weight_decay={saved['weight_decay']} to the gradient, as torch.optim.Adam does"
            if current["decay"] != "l2":
                raise ValueError(f'{optimizer}: the checkpoint adds {rule}; set decay="l2"')
        return True
    known = [text for key, text in OF_TORCH.items() if key in keys]
    whose = f"isokron.{name}" if name else f"another library, as of {known[0]}" if known else ""
    raise ValueError(
        f"{optimizer}: the checkpoint is of {whose or 'another library'}, not of {own} (it has "
        f"{', '.join(keys) or 'no state'}); load it into the optimizer that saved it"
    )


def _parsed(value: Any) -> tuple[str, int]:
    """Name and number of a format; "" for what is none."""
    name, _, number = value.rpartition(" ") if isinstance(value, str) else ("", "", "")
    return (name, int(number)) if number.isdecimal() else ("", 0)


def _in_order(optimizer: str, number: int, saved: Group, current: Group) -> list[Any]:
    """The keys of a saved group's parameters in the order of the current one's, by their names."""
    keys = list(saved["params"])
    theirs, ours = saved.get("param_names") or [], current.get("param_names") or []
    if not (theirs and ours) or any(isinstance(key, str) for key in keys):
        return keys  # torch.distributed.checkpoint has put them in order by the model's names
    if set(theirs) != set(ours):
        bare = [[_bare(name) for name in names] for names in (theirs, ours)]
        # not where two parameters would have one name: a layer may be called `module` too
        if all(len(set(names)) == len(names) for names in bare):
            theirs, ours = bare
    by_name = dict(zip(theirs, keys, strict=True))
    for name in ours:
        if name not in by_name:
            others = [repr(other) for other in theirs if other not in ours]
            raise ValueError(
                f"{optimizer}: group {number} of the checkpoint has no parameter {name!r}, and "
                f"this optimizer none named {', '.join(others[:3])}; make it from the model and "
                "groups that were saved, or correct state_dict['param_groups']"
                f"[{number}]['param_names']"
            )
    return [by_name[name] for name in ours]


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def not_finite(
    optimizer: str, state_dict: Mapping[str, Any], groups: Sequence[Group]
) -> str | None:
    """Which entry of a state dict in the order of `groups` has NaN or infinity; None: none has."""
    flags: list[Tensor] = []
    entries: list[tuple[Group, int, str]] = []
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for i, key in enumerate(saved["params"]):
            for name, value in (state_dict["state"].get(key) or {}).items():
                part = local(value) if isinstance(value, Tensor) and is_sharded(value) else value
                if isinstance(part, float):
                    part = torch.tensor(part, device="cpu")
                if isinstance(part, Tensor) and part.is_floating_point():
                    flags.append(part.isfinite().all())
                    entries.append((group, i, name))
    for (group, i, name), (finite,) in zip(entries, on_host(flags), strict=True):
        if not finite:
            return (
                f"{optimizer}: state of parameter {param_name(group, i)}: {name!r} has NaN or "
                "infinity in the checkpoint; load an earlier one"
            )
    return None
