"""Settings of parameter groups: defaults and rules."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor

from isokron import names
from isokron.block_layout import split_sizes
from isokron.distributed import is_flat_shard, is_sharded, sharded_mesh_dims
from isokron.optim.spectral import SCALES

P = ParamSpec("P")

# Types of settings that several constructors take.
Graft = Literal["sgd", "adagrad", "rmsprop", "adam"] | None
Refresh = Literal["together", "staggered"] | int
Average = Literal["schedule_free", "primal"] | None
Nonfinite = Literal["raise", "skip", "ignore"]

# Every group has these keys; an optimizer's own settings override them and add to them.
SHARED: dict[str, Any] = {
    # "method": matrices get the method, all else AdamW; "auto": the same, but matrices shaped like
    # an embedding or a head go to AdamW; "adamw": AdamW for all; "spectral": Muon's direction for
    # matrices, AdamW for all else
    "route": "auto",
    "max_rows": 30_000,  # for "auto": a matrix with more rows is a table; None: no limit
    "vectors": False,  # True: the method also steps vectors
    "stacked": 0,  # number of leading dimensions that count matrices, as in [experts, m, n]
    "split": None,  # parts of a fused projection: their sizes, or a number of equal parts
    "split_dim": 0,  # dimension of one matrix along which `split` cuts
    # 2: convolutions [out, in, h, w] are matrices [out, in·h·w]; None: dimensions are merged only
    # up to max_dim, and each has a factor
    "order": 2,
    "max_dim": None,  # longer dimensions are cut into blocks
    "lr_scale": 1.0,  # factor on lr, so that one schedule can drive groups of different rates
    "weight_decay": 0.0,
    # or "corrected": scaled by lr / its peak; "l2": into the gradient; "momentum": decoupled, and
    # part of the direction that Shampoo's, SOAP's and Katie's momentum accumulates
    "decay": "decoupled",
    "momentum": 0.0,
    "nesterov": False,
    "betas": (0.9, 0.999),  # of AdamW and of grafting, and of methods that say so
    "eps": 1e-8,
    "amsgrad": False,  # of AdamW
    # True: divide means that start at zero by 1 − βᵗ; AdamW always does
    "use_bias_correction": True,
    "polar": False,  # True: replace the direction of each block by its polar factor, as in Muon
    # of polar factors [m, n]: 0.2√max(m, n); "original" is √max(1, m/n), None is 1
    "scale": "match_rms_adamw",
    "graft": None,  # take the step length of "sgd", "adagrad", "rmsprop" or "adam"
    "every": 1,  # steps between refreshes
    "start": None,  # first refresh; then at 2·start, 4·start, … up to every. None: at every
    "warmup": 0,  # steps at first that all refresh; `start` and `every` count from there
    # "together": all blocks refresh in the same step; "staggered": blocks take turns; a whole
    # number n: a refresh runs on a thread and takes effect n steps later
    "refresh": "together",
    "tolerated": 3,  # failed refreshes of a block in a row before an error is raised
    "average": None,  # "schedule_free" or "primal" averages of the iterates
    "average_beta": 0.9,  # gradients are taken at βx + (1−β)z, x the average and z the iterate
    "average_decay": 0.99,  # of "primal": x ← decay·x + (1−decay)·z
    "maximize": False,
    "nonfinite": "raise",  # on a gradient that is not finite; or "skip" the step, or "ignore" it
    "flat": False,  # True: AdamW moves small tensors and their gradients into one buffer
    "state_dtype": torch.float32,  # least precision of the state; None: the parameter's dtype
    "moments": None,  # "8bit": in codes of 8 bits, with a scale for every 256 of them
    "min_8bit_size": 4096,  # tensors and blocks with fewer elements stay in state_dtype
    "rounding": "nearest",  # of steps of bfloat16 parameters; or "stochastic"
    # bytes of gradients or factors that are worked on at once; None: 32 MiB, or for Quad and Skew
    # what a CPU's cache holds
    "workspace": None,
    "mode": "train",  # set by optimizer.train() and optimizer.eval(), for averages
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "route": ("auto", "method", "adamw", "spectral"),
    "order": (2, None),
    "scale": SCALES,
    "decay": ("decoupled", "corrected", "l2", "momentum"),
    "graft": (None, "sgd", "adagrad", "rmsprop", "adam"),
    "average": (None, "schedule_free", "primal"),
    "nonfinite": ("raise", "skip", "ignore"),
    "moments": (None, "8bit"),
    "rounding": ("nearest", "stochastic"),
    "mode": ("train", "eval"),
}

# Group settings that Shampoo, SOAP and Katie have in common.
FACTOR_SETTINGS: dict[str, Any] = {
    "factor_dtype": None,
    "beta3": None,  # of the moment β₃M + (1−β₃)G that is stepped along; None: betas[0]
    "dampening": 0.0,  # δ of B ← μB + (1−δ)P
}

# Changing these needs no new layout of blocks and state; schedules and torch write some of them.
NO_LAYOUT = {"params", "param_names", "name", "lr", "initial_lr", "max_lr", "peak_lr", "mode"}

SWITCHES = ("fused", "foreach")  # of torch's optimizers; no number depends on them

# Keys of groups: the shared settings, and those that optimizers add when their class is defined.
GROUP_KEYS = set(SHARED) - {"mode"} | {"lr"}


# What a step reads of a group.


def learning_rate(group: Mapping[str, Any]) -> Any:
    """lr · lr_scale, a float or a tensor."""
    lr, scale = group["lr"], group["lr_scale"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    return lr if scale == 1.0 else lr * scale


def note_peak_(group: dict[str, Any]) -> None:
    """Remember the largest learning rate so far or announced, for decay="corrected"."""
    if group["decay"] == "corrected":
        rates = [group.get(key) or 0.0 for key in ("peak_lr", "initial_lr", "max_lr", "lr")]
        group["peak_lr"] = max(map(float, rates))


def follow_cycle_(group: dict[str, Any]) -> None:
    """Let `momentum` follow betas[0] while OneCycleLR or CyclicLR cycles it.

    They write betas[0] of every group that has betas, and these are AdamW's where the first
    moment's rate is `momentum`.
    """
    beta = group["betas"][0]
    if "max_momentum" in group and group.get("cycled") != beta:
        group["cycled"] = beta  # so that a later assignment to momentum stays
        if group["momentum"] > 0:
            group["momentum"] = beta


def added_decay(group: Mapping[str, Any], to: str) -> Any:
    """λ of λW added to the gradient ("l2"), or to the direction before its "momentum"."""
    return group["weight_decay"] if group["decay"] == to else 0.0


def decay_rate(group: Mapping[str, Any], added: str = "l2") -> Any:
    """λ of W ← W − lr·λW; "corrected" lets it fall with the learning rate (2506.02285).

    `added`: a further value of `decay` whose λW is part of the direction.
    """
    rate = 0.0 if group["decay"] in ("l2", added) else group["weight_decay"]
    if rate and group["decay"] == "corrected" and group["peak_lr"]:
        return rate * float(group["lr"]) / group["peak_lr"]
    return rate


def state_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """float32 state for half-precision parameters; a float64 parameter keeps float64."""
    least = group["state_dtype"]
    return param.dtype if least is None else torch.promote_types(param.dtype, least)


def refresh_delay(group: Mapping[str, Any]) -> int:
    """Steps after which a refresh on a thread takes effect; 0: refreshes are within their step."""
    return 0 if isinstance(group["refresh"], str) else group["refresh"]


def layout_settings(group: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The settings among `keys` that blocks and the form of the state depend on.

    Of numbers such as decay rates, which schedules change, only whether they are above 0.
    """

    def form(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(form, value))
        if isinstance(value, Tensor):
            return None
        return value > 0 if isinstance(value, float) else value

    return {key: form(group[key]) for key in keys if key not in NO_LAYOUT}


def param_name(group: Mapping[str, Any], i: int) -> str:
    """The group's i-th parameter in an error: its name if there is one, else number and shape."""
    names = group.get("param_names")
    return repr(names[i]) if names else f"number {i} of shape {tuple(group['params'][i].shape)}"


# Names of settings.


def without_switches(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a constructor: `fused` and `foreach` of torch's optimizers are taken, and ignored.

    They choose among implementations of one step, and there is one implementation here.
    """

    @functools.wraps(init)
    def called(*args: P.args, **keywords: P.kwargs) -> None:
        init(*args, **{k: v for k, v in keywords.items() if k not in SWITCHES})  # type: ignore[arg-type]

    return called


def checked_keywords(
    group_settings: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a constructor: an unknown keyword raises an error that says what to write instead.

    `group_settings`: settings of the method that only parameter groups take, with their defaults.
    """
    only_groups = frozenset(group_settings or ())

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        takes = list(inspect.signature(init).parameters)[2:]  # without self and params
        GROUP_KEYS.update(only_groups, takes)
        valid = {*takes, *only_groups, *SHARED} - {"mode"}
        checked = without_switches(names.answered(init, valid))
        checked.group_settings = only_groups  # type: ignore[attr-defined]
        return checked

    return decorate


def keywords_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords among the `locals()` of a constructor, whose every argument is a setting."""
    others = ("self", "__class__", "params", "lr")
    return {name: value for name, value in arguments.items() if name not in others}


def check_settings(optimizer: type, settings: Mapping[str, Any]) -> None:
    """Refuse unknown settings that a constructor with `**settings` has passed on."""
    constructors = [vars(cls)["__init__"] for cls in optimizer.__mro__ if "__init__" in vars(cls)]
    signatures = [inspect.signature(init).parameters.values() for init in constructors[:-1]]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signatures[0]):
        return  # Python has checked the keywords
    valid = {*SHARED, "lr"} - {"mode"}
    for init, parameters in zip(constructors, signatures, strict=False):
        valid |= getattr(init, "group_settings", frozenset())
        valid |= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in settings:
        if name not in valid:
            raise TypeError(names.unknown_keyword(optimizer.__name__, name, valid, valid))


def check_spelling(optimizer: str, keys: Iterable[str], valid: Collection[str]) -> None:
    """Refuse group keys that are misspelt, of another library or of another optimizer.

    What else users keep in their groups is left alone.
    """
    for key in keys:
        if key in valid or key in (*SWITCHES, "params", "param_names"):
            continue
        _, text = names.hint(optimizer, key, valid, 0.85)
        if not text and key in GROUP_KEYS - SHARED.keys():
            text = "it is a setting of another optimizer"
        if text:
            raise ValueError(f"{optimizer}: unknown key {key!r} in a parameter group; {text}")


# Values of settings.


def require(ok: bool, optimizer: str, group: Mapping[str, Any], name: str, rule: str) -> None:
    """Raise one ValueError that names the argument, the rule and the value."""
    if not ok:
        raise ValueError(f"{optimizer}: {name} must be {rule}, got {name}={group[name]!r}")


def is_number(value: Any, least: float = 0.0, below: float = math.inf) -> bool:
    """Whether it is a finite number in [least, below)."""
    return least <= _scalar(value) < below


def is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_dtype(value: Any) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)


def _scalar(value: Any) -> float:
    """The number as a float; NaN, which fails every comparison, for anything else."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else math.nan
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are Real too
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


Rule = tuple[str, Callable[[Any], bool]]
NONNEGATIVE: Rule = ("a finite number of at least 0", is_number)
FRACTION: Rule = ("at least 0 and below 1", lambda value: is_number(value, below=1))
LIMIT: Rule = ("None or a whole number above 0", lambda value: value is None or is_whole(value, 1))
COUNT: Rule = ("a whole number of at least 0", is_whole)
SWITCH: Rule = ("True or False", lambda value: isinstance(value, bool))
FLOAT_DTYPE: Rule = ("None or a floating-point dtype", _is_dtype)
RULES: dict[str, Rule] = {
    **dict.fromkeys(("lr", "weight_decay", "eps"), NONNEGATIVE),
    "lr_scale": ("a finite number above 0", lambda value: is_number(value) and value > 0),
    **dict.fromkeys(("momentum", "average_decay"), FRACTION),
    "average_beta": ("at least 0 and at most 1", lambda value: 0 <= _scalar(value) <= 1),
    **{
        name: (f"one of {', '.join(map(repr, choices))}", choices.__contains__)
        for name, choices in CHOICES.items()
    },
    "route": (
        "one of 'auto', 'method', 'adamw', 'spectral' (one optimizer has one method; for another, "
        "use a second optimizer)",
        CHOICES["route"].__contains__,
    ),
    **dict.fromkeys(("warmup", "stacked", "split_dim", "tolerated", "min_8bit_size"), COUNT),
    "every": ("a whole number of at least 1", lambda value: is_whole(value, 1)),
    "workspace": (
        "None or a whole number of bytes above 0",
        lambda value: value is None or is_whole(value, 1),
    ),
    **dict.fromkeys(("start", "max_dim", "max_rows"), LIMIT),
    **dict.fromkeys(("vectors", "nesterov", "use_bias_correction", "polar"), SWITCH),
    **dict.fromkeys(("maximize", "amsgrad", "flat"), SWITCH),
    "refresh": (
        "'together', 'staggered' or a delay in steps, a whole number above 0",
        lambda value: value in ("together", "staggered") or is_whole(value, 1),
    ),
    "state_dtype": FLOAT_DTYPE,
}


def check_group(optimizer: str, group: Mapping[str, Any], sums: bool = False) -> None:
    """Check the settings that all optimizers share.

    `sums`: whether betas[1] may be 1, at which squares are summed.
    """
    for name, (rule, holds) in RULES.items():
        require(holds(group[name]), optimizer, group, name, rule)
    betas = group["betas"]
    pair = isinstance(betas, Sequence) and len(betas) == 2
    fine = pair and not any(isinstance(beta, Tensor) for beta in betas)
    fine = fine and is_number(betas[0], below=1)
    fine = fine and (is_number(betas[1], below=1) or (sums and betas[1] == 1))
    rule = "two numbers in [0, 1)" + (", the second at most 1" if sums else "")
    require(fine, optimizer, group, "betas", rule)
    if delay := refresh_delay(group):
        rule = f"a word with a warmup, whose steps refresh at once (warmup={group['warmup']})"
        require(not group["warmup"], optimizer, group, "refresh", rule)
        rule = f"below every={group['every']}, the steps from one refresh to the next"
        require(delay < group["every"], optimizer, group, "refresh", rule)
    rule = "False where momentum is 0 (there is nothing to look ahead with)"
    require(not group["nesterov"] or group["momentum"] > 0, optimizer, group, "nesterov", rule)


def plain(value: Any) -> Any:
    """A number of NumPy as Python's and a list as a tuple: to be compared, and saved as plain."""
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value.item() if type(value).__module__ == "numpy" and not value.ndim else value


def check_number(optimizer: str, name: str, value: Any, rule: str = "at least 0") -> None:
    """A finite number of at least 0, or above 0."""
    ok = is_number(value) and (rule == "at least 0" or _scalar(value) > 0)
    require(ok, optimizer, {name: value}, name, f"a finite number {rule}")


def check_factors(optimizer: str, group: Mapping[str, Any]) -> None:
    """FACTOR_SETTINGS, and `factor_beta` of second moments along each dimension."""
    beta = group["factor_beta"]
    ok = beta is None or 0 <= _scalar(beta) <= 1
    require(ok, optimizer, group, "factor_beta", "at least 0 and at most 1")
    dtype = group["factor_dtype"]
    rule = f"{FLOAT_DTYPE[0]}, or '8bit'"
    require(dtype == "8bit" or _is_dtype(dtype), optimizer, group, "factor_dtype", rule)
    beta3, moment = group["beta3"], group["betas"][0] > 0
    rule = "None, or in [0, 1) where betas[0] is above 0"
    fine = beta3 is None or (moment and is_number(beta3, below=1))
    require(fine, optimizer, group, "beta3", rule)
    rule = "in [0, 1), and 0 where momentum is 0 (there is nothing to dampen)"
    fine = is_number(group["dampening"], below=1 if group["momentum"] else 1e-300)
    require(fine, optimizer, group, "dampening", rule)


def check_choices(
    optimizer: str, group: Mapping[str, Any], choices: Mapping[str, tuple[Any, ...]]
) -> None:
    for name, values in choices.items():
        require(group[name] in values, optimizer, group, name, f"one of {values}")


def check_adamw(optimizer: str, name: str, group: Mapping[str, Any]) -> None:
    """Refuse settings that AdamW, which steps this parameter, has no kernel for."""
    if group["betas"][1] == 1:
        raise ValueError(
            f"{optimizer}: betas[1] must be below 1 for AdamW, which steps parameter {name}; give "
            "it a group with other betas, or set vectors=True in its group"
        )


def check_param(
    optimizer: str, name: str, param: Tensor, group: Mapping[str, Any], elementwise: bool = False
) -> None:
    """Refuse parameters that cannot be stepped, before any state exists.

    `elementwise`: elements are stepped independently, so that any part of a parameter will do.
    """

    def refuse(problem: object) -> None:
        raise ValueError(f"{optimizer}: parameter {name}{problem}")

    stacked, shape = group["stacked"], tuple(param.shape)
    if is_flat_shard(param) and group["moments"] is not None:
        refuse(
            f" was flattened by FSDP1, for which moments must be None, got {group['moments']!r}; "
            "shard the model with FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    if is_flat_shard(param) and not elementwise:
        refuse(
            " was flattened by FSDP1 (FullyShardedDataParallel), which leaves no matrices; shard "
            "the model with FSDP2 (torch.distributed.fsdp.fully_shard), or use isokron.AdamW"
        )
    if stacked and param.ndim < stacked + 2:
        refuse(
            f" has shape {shape}, but stacked={stacked} needs at least {stacked + 2} dimensions; "
            "give it a group of its own"
        )
    try:
        if group["split"] is not None:
            split_sizes(shape[stacked:], group["split"], group["split_dim"])
        if is_sharded(param):
            sharded_mesh_dims(param)
    except ValueError as error:
        refuse(f": {error}")
    if not param.is_floating_point():
        refuse(
            f" has dtype {param.dtype}, but only real floating-point parameters are supported; "
            "view a complex one with torch.view_as_real"
        )
    if param.layout is not torch.strided:
        refuse(
            f" has layout {param.layout}, but only dense parameters are supported; call .to_dense()"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), shape, strict=True)):
        refuse(
            f" of shape {shape} is an expanded tensor whose elements share memory; call "
            ".contiguous() before making it a parameter"
        )
