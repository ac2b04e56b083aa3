"""What a parameter group says: the settings every optimizer shares, and what makes one wrong."""

import difflib
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from isokron.optim.blocks import split_sizes

# Every group carries these; an optimizer's own arguments override them and add to them.
SHARED: dict[str, Any] = {
    "lr_scale": 1.0,  # the group's factor on the one schedule of all groups
    "route": "auto",  # "auto": matrices get the method, the rest AdamW; "adamw": all AdamW
    "stacked": 0,  # leading dimensions that count matrices, as in [experts, m, n]
    "split": None,  # parts of a fused projection: sizes, or a number of equal parts
    "split_dim": 0,  # the dimension of one matrix along which `split` cuts
    "weight_decay": 0.0,
    "decay": "decoupled",  # or "l2": into the gradient
    "momentum": 0.0,
    "nesterov": False,
    "graft": None,  # whose step length: "sgd", "adagrad", "rmsprop", "adam" or the method's own
    "every": 1,  # steps between refreshes
    "start": None,  # the first refresh; `every` by default
    "max_dim": None,  # blocks are cut here
    "betas": (0.9, 0.999),  # of AdamW; β₂ also of grafting
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
    "nonfinite": "raise",  # or "skip" the step, or "ignore" (no check)
    "state_dtype": torch.float32,  # at least this wide; None: the parameter's own
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "route": ("auto", "adamw"),
    "decay": ("decoupled", "l2"),
    "graft": (None, "sgd", "adagrad", "rmsprop", "adam"),
    "nonfinite": ("raise", "skip", "ignore"),
}


def learning_rate(group: Mapping[str, Any]) -> Any:
    """The group's own rate: the schedule's value times the group's scale. A float or a tensor."""
    lr, scale = group["lr"], group["lr_scale"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    return lr if scale == 1.0 else lr * scale


def state_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """float32 state for half-precision parameters; a float64 parameter keeps float64."""
    asked = group["state_dtype"]
    return param.dtype if asked is None else torch.promote_types(param.dtype, asked)


def param_name(group: Mapping[str, Any], i: int) -> str:
    """How an error calls the group's i-th parameter: its name, if the optimizer was given names."""
    names = group.get("param_names")
    return repr(names[i]) if names else f"number {i} of shape {tuple(group['params'][i].shape)}"


def check_group(optimizer: str, group: Mapping[str, Any]) -> None:
    """Raise one ValueError that names the argument, the rule, the value and the remedy."""

    def need(ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise ValueError(f"{optimizer}: {name} must be {rule}, got {name}={group[name]!r}")

    need(_scalar(group["lr"]) >= 0, "lr", "a finite number of at least 0")
    for name in ("lr_scale", "weight_decay", "eps"):
        need(_scalar(group[name]) >= 0, name, "a finite number of at least 0")
    need(0 <= _scalar(group["momentum"]) < 1, "momentum", "at least 0 and below 1")
    betas = group["betas"]
    pair = isinstance(betas, Sequence) and len(betas) == 2
    numbers = pair and not any(isinstance(beta, Tensor) for beta in betas)
    need(numbers and all(0 <= _scalar(b) < 1 for b in betas), "betas", "two numbers in [0, 1)")
    for name, choices in CHOICES.items():
        need(group[name] in choices, name, f"one of {', '.join(map(repr, choices))}")
    for name, least in (("every", 1), ("stacked", 0), ("split_dim", 0)):
        need(_whole(group[name], least), name, f"a whole number of at least {least}")
    for name in ("start", "max_dim"):
        need(group[name] is None or _whole(group[name], 1), name, "None or a whole number above 0")
    need(
        not (group["nesterov"] and group["momentum"] == 0),
        "nesterov",
        "False where momentum is 0 (there is nothing to look ahead with)",
    )
    wide = group["state_dtype"]
    need(
        wide is None or (isinstance(wide, torch.dtype) and wide.is_floating_point),
        "state_dtype",
        "None or a floating-point dtype",
    )


def check_spelling(optimizer: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """A group key that is nearly one of ours would silently do nothing: refuse it."""
    for key in given:
        if key not in known and key not in ("params", "param_names"):
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
            if close:
                raise ValueError(
                    f"{optimizer}: unknown key {key!r} in a parameter group; "
                    f"did you mean {close[0]!r}?"
                )


def check_param(optimizer: str, name: str, param: Tensor, group: Mapping[str, Any]) -> None:
    """Refuse what no step could be right for, before any state exists."""
    stacked, split = group["stacked"], group["split"]
    if stacked and param.ndim < stacked + 2:
        raise ValueError(
            f"{optimizer}: stacked={stacked} needs at least {stacked + 2} dimensions, but "
            f"parameter {name} has shape {tuple(param.shape)}; give it a group of its own"
        )
    if split is not None:
        try:
            split_sizes(param.shape[stacked:], split, group["split_dim"])
        except ValueError as error:
            raise ValueError(f"{optimizer}: parameter {name}: {error}") from None
    if not param.is_floating_point():
        raise ValueError(
            f"{optimizer}: parameter {name} has dtype {param.dtype}, but only real floating-point "
            "parameters are supported; view a complex one with torch.view_as_real"
        )
    if param.layout is not torch.strided:
        raise ValueError(
            f"{optimizer}: parameter {name} has layout {param.layout}; only dense parameters are "
            "supported, call .to_dense()"
        )
    if any(
        stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)
    ):
        raise ValueError(
            f"{optimizer}: parameter {name} of shape {tuple(param.shape)} is an expanded tensor "
            "whose elements share memory; call .contiguous() before making it a parameter"
        )


def _scalar(value: Any) -> float:
    """The number as a float; NaN, which fails every comparison, for anything else."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else math.nan
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are Real too
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
