"""What a parameter group says, and what makes it wrong."""

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import cut_along, is_flat_shard, is_sharded
from isokron.optim.blocks import split_sizes
from isokron.optim.cadence import check_cadence
from isokron.optim.settings import CHOICES, SHARED

# Other libraries' names of settings, and what they are called here, whichever an optimizer has.
PEERS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("lr",),
    "beta1": ("betas",),
    "beta2": ("betas",),
    "b1": ("momentum",),
    "epsilon": ("damping", "eps"),
    "precondition_frequency": ("every",),
    "preconditioning_frequency": ("every",),
    "preconditioning_compute_steps": ("every",),
    "preconditioner_update_freq": ("every",),
    "update_freq": ("every",),
    "start_preconditioning_step": ("start",),
    "shampoo_beta": ("factor_beta",),
    "preconditioner_dtype": ("factor_dtype",),
    "factor_matrix_dtype": ("factor_dtype",),
    "exponent_override": ("exponent",),
    "inv_root_override": ("exponent",),
    "precondition_1d": ("vectors",),
    "max_precond_dim": ("max_dim", "max_size_dense"),
    "max_preconditioner_dim": ("max_dim", "max_size_dense"),
    "max_size_triangular": ("max_size_dense",),
    "block_size": ("max_dim",),
    "grafting_config": ("graft",),
    "grafting_type": ("graft",),
    "graft_type": ("graft",),
    "momentum_decay": ("momentum",),
    "use_nesterov": ("nesterov",),
    "correct_bias": ("use_bias_correction",),
    "normalize_grads": ("normalize",),
    "ns_steps": ("steps",),
    "ns_coefficients": ("coefficients",),
    "adjust_lr_fn": ("scale",),
    "use_decoupled_weight_decay": ("decay",),
    "decoupled_weight_decay": ("decay",),
    "weight_decouple": ("decay",),
}

LEAST = {"every": 1, "warmup": 0, "stacked": 0, "split_dim": 0, "tolerated": 0}


def learning_rate(group: Mapping[str, Any]) -> Any:
    """The group's own rate: the schedule's value times the group's scale. A float or a tensor."""
    lr, scale = group["lr"], group["lr_scale"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    return lr if scale == 1.0 else lr * scale


def note_peak_(group: dict[str, Any]) -> None:
    """Remember the largest learning rate there was or is to be, where weight decay needs it."""
    if group["decay"] == "corrected":
        rates = [group.get(key) or 0.0 for key in ("peak_lr", "initial_lr", "max_lr", "lr")]
        group["peak_lr"] = max(map(float, rates))


def decay_rate(group: Mapping[str, Any]) -> Any:
    """λ of W ← W − lr·λW; "corrected" lets it fall with the learning rate (2506.02285)."""
    rate = 0.0 if group["decay"] == "l2" else group["weight_decay"]
    if rate and group["decay"] == "corrected" and group["peak_lr"]:
        return rate * float(group["lr"]) / group["peak_lr"]
    return rate


def state_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """float32 state for half-precision parameters; a float64 parameter keeps float64."""
    asked = group["state_dtype"]
    return param.dtype if asked is None else torch.promote_types(param.dtype, asked)


def param_name(group: Mapping[str, Any], i: int) -> str:
    """How an error calls the group's i-th parameter: its name, if the optimizer was given names."""
    names = group.get("param_names")
    return repr(names[i]) if names else f"number {i} of shape {tuple(group['params'][i].shape)}"


def check_group(optimizer: str, group: Mapping[str, Any], sums: bool = False) -> None:
    """Raise one ValueError that names the argument, the rule, the value and the remedy.

    `sums`: whether betas[1] may be 1, at which squares are summed.
    """

    def need(ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise ValueError(f"{optimizer}: {name} must be {rule}, got {name}={group[name]!r}")

    need(_scalar(group["lr"]) >= 0, "lr", "a finite number of at least 0")
    for name in ("lr_scale", "weight_decay", "eps"):
        need(_scalar(group[name]) >= 0, name, "a finite number of at least 0")
    for name in ("momentum", "average_decay"):
        need(0 <= _scalar(group[name]) < 1, name, "at least 0 and below 1")
    need(0 <= _scalar(group["average_beta"]) <= 1, "average_beta", "at least 0 and at most 1")
    betas = group["betas"]
    pair = isinstance(betas, Sequence) and len(betas) == 2
    numbers = pair and not any(isinstance(beta, Tensor) for beta in betas)
    fine = numbers and 0 <= _scalar(betas[0]) < 1
    fine = fine and (0 <= _scalar(betas[1]) < 1 or (sums and betas[1] == 1))
    need(
        fine,
        "betas",
        "two numbers in [0, 1), the second at most 1" if sums else "two numbers in [0, 1)",
    )
    for name, choices in CHOICES.items():
        need(group[name] in choices, name, f"one of {', '.join(map(repr, choices))}")
    for name, least in LEAST.items():
        need(_whole(group[name], least), name, f"a whole number of at least {least}")
    need(_whole(group["workspace"], 1), "workspace", "a whole number of bytes above 0")
    for name in ("start", "max_dim", "max_rows"):
        need(group[name] is None or _whole(group[name], 1), name, "None or a whole number above 0")
    for name in (
        "vectors",
        "nesterov",
        "use_bias_correction",
        "maximize",
        "amsgrad",
        "flat",
    ):
        need(isinstance(group[name], bool), name, "True or False")
    need(
        group["refresh"] in ("together", "staggered") or _whole(group["refresh"], 1),
        "refresh",
        "'together', 'staggered' or a delay in steps, a whole number above 0",
    )
    if wrong := check_cadence(group):
        need(False, "refresh", wrong)
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


def check_method(method: Any, group: Mapping[str, Any]) -> None:
    """Refuse settings that would do nothing, or nothing sensible, for an optimizer of this kind."""

    def need(ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise ValueError(
                f"{method.__name__}: {name} must be {rule}, got {name}={group[name]!r}"
            )

    need(
        group["use_bias_correction"] or not method.elementwise,
        "use_bias_correction",
        "True for AdamW, which always corrects bias",
    )
    need(
        not (group["vectors"] and method.order == 2),
        "vectors",
        "False for a method of matrices; vectors go to AdamW",
    )
    need(
        isinstance(group["refresh"], str) or bool(method.operator),
        "refresh",
        "'together' or 'staggered' for a method whose `operator` names no state",
    )


def check_number(optimizer: str, name: str, value: Any, rule: str = "at least 0") -> None:
    """A finite number of at least 0, or above 0."""
    number = _scalar(value)
    if not (number > 0 or (number == 0 and rule == "at least 0")):
        raise ValueError(
            f"{optimizer}: {name} must be a finite number {rule}, got {name}={value!r}"
        )


def check_factors(optimizer: str, group: Mapping[str, Any]) -> None:
    """What methods with one factor a dimension have in common."""
    beta, dtype = group["factor_beta"], group["factor_dtype"]
    if beta is not None and not 0 <= _scalar(beta) <= 1:
        raise ValueError(
            f"{optimizer}: factor_beta must be at least 0 and at most 1, got factor_beta={beta!r}"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"{optimizer}: factor_dtype must be None or a floating-point dtype, got {dtype!r}"
        )


def check_settings(optimizer: type, settings: Mapping[str, Any]) -> None:
    """Refuse what a constructor's `**shared` let through and nothing would ever read."""
    named, rest = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    makers = [vars(cls)["__init__"] for cls in optimizer.__mro__ if "__init__" in vars(cls)]
    kinds = [inspect.signature(maker).parameters.values() for maker in makers[:-1]]
    if not any(parameter.kind is rest for parameter in kinds[0]):
        return  # Python has checked the keywords itself
    own = {parameter.name for several in kinds for parameter in several if parameter.kind is named}
    known = sorted((own | set(SHARED) | {"lr"}) - {"mode"})
    for name in settings:
        if name not in known:
            hint = _meant(name, known, 0.6) or f"it takes {', '.join(known)}"
            raise TypeError(
                f"{optimizer.__name__} got an unexpected keyword argument {name!r}; {hint}"
            )


def check_spelling(optimizer: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """A group key that is nearly one of ours, or a peer's name of one, would silently do nothing:
    refuse it."""
    for key in given:
        if key not in known and key not in ("params", "param_names"):
            hint = _meant(key, known, 0.85)
            if hint:
                raise ValueError(f"{optimizer}: unknown key {key!r} in a parameter group; {hint}")


def _meant(name: str, known: Sequence[str], cutoff: float) -> str:
    """Which of the known settings a name is likely to stand for; empty if none."""
    peers = [each for each in PEERS.get(name, ()) if each in known]
    close = peers or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def check_adamw(optimizer: str, name: str, group: Mapping[str, Any]) -> None:
    """Refuse settings that AdamW, to which this parameter goes, has no kernel for."""
    if group["betas"][1] == 1:
        raise ValueError(
            f"{optimizer}: betas[1] must be below 1 for AdamW, which steps parameter {name}; give "
            "it a group with other betas, or pass vectors=True"
        )


def check_param(
    optimizer: str, name: str, param: Tensor, group: Mapping[str, Any], elementwise: bool = False
) -> None:
    """Refuse what no step could be right for, before any state exists.

    `elementwise`: any part of a parameter is stepped as it would be in the whole.
    """
    if is_flat_shard(param) and not elementwise:
        raise ValueError(
            f"{optimizer}: parameter {name} was flattened by FSDP1 (FullyShardedDataParallel), "
            "which leaves nothing of matrices; shard the model with FSDP2 "
            "(torch.distributed.fsdp.fully_shard), or take isokron.AdamW"
        )
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
    if is_sharded(param):
        try:
            cut_along(param)
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
