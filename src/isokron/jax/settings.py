"""The settings of all optimizers: defaults, validation, and values given as trees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from isokron.names import unknown_keyword
from isokron.white_kron import GROWTH_LIMIT


class Rule(NamedTuple):
    """A condition on a setting: its text for errors, and its test."""

    text: str
    holds: Callable[[Any], bool]


def number(
    text: str,
    inside: Callable[[Any], Any],
    types: Any = (int, float, np.number),
    traced: bool = True,
) -> Rule:
    """A number for which `inside` holds; `traced`: whether it may be an array."""

    def holds(value: Any) -> bool:
        if isinstance(value, jax.core.Tracer):
            # its value is not known yet
            return traced
        if isinstance(value, jax.Array):
            return traced and value.ndim == 0 and bool(inside(value))
        return isinstance(value, types) and not isinstance(value, bool) and bool(inside(value))

    return Rule(text, holds)


def integer(least: int, traced: bool = False) -> Rule:
    text = f"an integer of at least {least}"
    return number(text, lambda x: x >= least, (int, np.integer), traced)


def choice(*values: Any) -> Rule:
    return Rule(f"one of {values}", lambda value: value in values)


def optional(rule: Rule) -> Rule:
    return Rule(f"None or {rule.text}", lambda value: value is None or rule.holds(value))


def dtype_name(value: Any) -> str:
    """The name of a dtype, or "" for what is none."""
    try:
        return jnp.dtype(value).name
    except TypeError:
        return ""


def _storable(dtype: Any) -> bool:
    # without jax_enable_x64, float64 would silently be float32
    wide = jax.config.read("jax_enable_x64")
    return dtype_name(dtype) in ("bfloat16", "float32", *(["float64"] if wide else []))


ANYTHING = Rule("anything", lambda value: True)
NOT_NEGATIVE = number("a number of at least 0", lambda x: 0 <= x < float("inf"))
FRACTION = number("a number in [0, 1)", lambda x: 0 <= x < 1)
FLAG = Rule("True or False", lambda value: isinstance(value, bool))
FLOATING = optional(Rule("a floating-point dtype", lambda x: "float" in dtype_name(x)))
STORABLE = optional(Rule("bfloat16, float32 or, with jax_enable_x64, float64", _storable))
PAIR = Rule(
    "two numbers in [0, 1)",
    lambda x: isinstance(x, Sequence) and len(x) == 2 and all(map(FRACTION.holds, x)),
)

# Settings of every optimizer: the default, unless its constructor has another, and the rule.
SHARED: dict[str, tuple[Any, Rule]] = {
    "betas": ((0.9, 0.999), PAIR),
    "eps": (1e-8, NOT_NEGATIVE),
    "momentum": (0.0, FRACTION),
    "nesterov": (False, FLAG),
    "dampening": (0.0, FRACTION),
    "beta3": (None, optional(FRACTION)),
    "graft": (None, choice(None, "sgd", "adagrad", "rmsprop", "adam")),
    "factor_dtype": (None, FLOATING),
    "state_dtype": (None, ANYTHING),
    "tolerance": (0.0, NOT_NEGATIVE),
    "every": (1, integer(1, traced=True)),
    "start": (None, optional(integer(1, traced=True))),
    "warmup": (0, integer(0, traced=True)),
    "order": (2, choice(2, None)),
    "max_dim": (None, optional(integer(1))),
    "vectors": (False, FLAG),
    "polar": (False, FLAG),
    "stacked": (0, ANYTHING),
    "split": (None, ANYTHING),
    "split_dim": (0, integer(0)),
    "max_size_dense": (16384, integer(1)),
    "preconditioner_lr_floor": (0.4, NOT_NEGATIVE),
    "pipeline_axis_name": (None, ANYTHING),
    "pipeline_axis_size": (None, optional(integer(1))),
    "params_partition_specs": (None, ANYTHING),
}
DEFAULTS = {name: default for name, (default, _) in SHARED.items()}
# Rules for settings that only some optimizers have.
WHITE_KRON_RULES = {
    "normalize": FLAG,
    "normalize_grads": FLAG,
    "lr_style": choice("adam", None),
    "apply": choice("new", "old"),
    "block_size": integer(1),
    "stacked": Rule("numbers of dimensions", lambda value: not isinstance(value, jax.Array)),
    "preconditioner_lr": number("a number in (0, 1]", lambda x: 0 < x <= 1),
    "preconditioner_init_scale": number("a number in (0, 1e6]", lambda x: 0 < x <= GROWTH_LIMIT),
    "noise_scale": NOT_NEGATIVE,
    "damping": NOT_NEGATIVE,
    "dtype": STORABLE,
}
RULES: dict[str, dict[str, Rule]] = {
    "SOAP": {"factor_beta": optional(FRACTION), "basis": choice("qr", "eigh")},
    "Shampoo": {
        "factor_beta": number("a number in [0, 1]", lambda x: 0 <= x <= 1),
        "damping": NOT_NEGATIVE,
        "form": choice("root", "eigen"),
        "statistic": choice("gradient", "kl", "kl_sum"),
    },
    "Katie": {
        "factor_beta": FRACTION,
        "damping": number("a number above 0", lambda x: 0 < x < float("inf")),
        "form": choice("sequential", "symmetric"),
        "statistic": choice("correlation", "raw"),
    },
    "Muon": {"scale": choice("match_rms_adamw", "original", None), "dtype": FLOATING},
    "Quad": WHITE_KRON_RULES,
    "Skew": WHITE_KRON_RULES,
}


@dataclass(frozen=True)
class Static:
    """A default on which shapes depend. optax.inject_hyperparams makes arrays of plain numbers."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


class LayoutSettings(TypedDict, total=False):
    """Settings of every optimizer that say what a leaf consists of."""

    stacked: Any  # leading dimensions that count matrices: a number, or a tree of numbers
    split: Any  # parts of a fused projection: sizes, or how many; or a tree of those
    split_dim: int  # the dimension of one matrix along which `split` cuts


class FactorSettings(LayoutSettings, total=False):
    """Further settings of Shampoo, SOAP and Katie."""

    eps: float  # ε beside the root of a second moment
    momentum: float  # of a heavy ball on the update
    nesterov: bool  # whether that looks ahead
    dampening: float  # δ of B ← μB + (1−δ)P, the heavy ball
    beta3: float | None  # of the moment β₃M + (1−β₃)G that is stepped along; None: betas[0]
    factor_dtype: Any  # of the factors' statistics; by default that of the state
    warmup: int  # steps at first that each refresh; `start` and `every` count from there
    vectors: bool  # whether the method steps vectors too
    order: int | None  # 2: convolutions are matrices; None: dimensions merge only up to max_dim
    polar: bool  # whether the polar factor of each block's direction replaces it, as in Muon


class ShampooSettings(FactorSettings, total=False):
    """Those of Shampoo."""

    tolerance: float  # with form="eigen": relative error up to which a basis is not refreshed


class WhiteKronSettings(TypedDict, total=False):
    """Further settings of Quad and Skew."""

    preconditioner_lr_floor: float  # that `preconditioner_lr` decays to
    warmup: int  # steps at first that each update the factors; `every` counts from there


def settle(
    optimizer: str,
    arguments: Mapping[str, Any],
    kind: type,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """All settings of an optimizer as plain values, checked.

    Args:
        optimizer: its name, for its rules and for errors.
        arguments: locals() of its constructor, whose **shared are those of `kind`.
        kind: the TypedDict of its further settings.
        aliases: names of settings in other libraries, and ours.
    """
    named = {name: value for name, value in arguments.items() if name != "shared"}
    # optax.inject_hyperparams passes **shared on as one argument of that name
    shared = {**arguments["shared"], **arguments["shared"].get("shared", {})}
    shared = {(aliases or {}).get(key, key): x for key, x in shared.items() if key != "shared"}
    allowed = {*named, *kind.__annotations__}
    for name in shared:
        if name not in allowed:
            outer = ("learning_rate", "lr_scale", "weight_decay", "weight_decay_mask")
            raise TypeError(unknown_keyword(optimizer, name, {*allowed, *outer}))
    settings = {
        name: value.value if isinstance(value, Static) else value
        for name, value in {**DEFAULTS, **named, **shared}.items()
    }
    shared_rules = {name: rule for name, (_, rule) in SHARED.items()}
    for name, rule in {**shared_rules, **RULES[optimizer]}.items():
        if not rule.holds(settings[name]):
            remedy = "; under optax.inject_hyperparams name it in static_args"
            remedy = remedy if isinstance(settings[name], jax.Array) else ""
            raise ValueError(f"{name} must be {rule.text}, got {settings[name]!r}{remedy}")
    if settings["nesterov"] and is_zero(settings["momentum"]):
        raise ValueError("nesterov must be False where momentum is 0, got True; set a momentum")
    if not is_zero(settings["dampening"]) and is_zero(settings["momentum"]):
        raise ValueError(
            f"dampening must be 0 where momentum is 0, got {settings['dampening']}; set a momentum"
        )
    if settings["beta3"] is not None and is_zero(settings["betas"][0]):
        raise ValueError(
            f"beta3 must be None where betas[0] is 0, got {settings['beta3']}; set betas"
        )
    if settings["polar"] and settings["vectors"]:
        raise ValueError(
            "polar must be False where vectors=True, got True; vectors have no polar factor"
        )
    return {"optimizer": optimizer, **settings}


def in_dtype(settings: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The same settings, with floating-point arrays cast to the working dtype."""
    return {
        name: value.astype(dtype)
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
        else value
        for name, value in settings.items()
    }


def is_zero(value: Any) -> bool:
    """Whether a setting is certainly 0; a traced one may be anything."""
    return isinstance(value, (int, float)) and value == 0


def first_refresh(settings: Mapping[str, Any]) -> Any:
    return settings["every"] if settings["start"] is None else settings["start"]


def refresh_due(settings: Mapping[str, Any]) -> jax.Array | bool:
    """Whether operators are refreshed in this step.

    In each of the first `warmup` steps; then, counted from there, at start, start·2, start·4, …
    below `every`, and at every multiple of it.
    """
    start, every, warmup = first_refresh(settings), settings["every"], settings["warmup"]
    if isinstance(start, int) and isinstance(every, int) and start == every == 1:
        return True
    step = settings["count"] - warmup
    times = step // start
    doubled = (step % start == 0) & (times & (times - 1) == 0)
    later = jnp.where(step < every, doubled, step % every == 0)
    return jnp.where(step <= start, step == start, later) | (step <= 0)


def is_sizes(value: Any) -> bool:
    """Whether it is one value of `split`, sizes or how many, and no tree of them."""
    sizes = value if isinstance(value, tuple | list) else (value,)
    return len(sizes) > 0 and all(isinstance(n, int | np.integer) for n in sizes)


def values_by_path(
    name: str, tree: Any, values: Any, is_value: Callable[[Any], bool] = lambda _: False
) -> list[Any]:
    """The value for each leaf in a tree of values, which may end early: one for a whole subtree.

    `is_value`: what is a value of the tree though it is a tree to JAX.
    """
    # by path and not by position, because optax.masked takes leaves out of `tree` only
    ends = (type(None), PartitionSpec, NamedSharding)
    by_path = dict(
        jax.tree.leaves_with_path(
            values, is_leaf=lambda node: isinstance(node, ends) or is_value(node)
        )
    )
    result = []
    for path, _ in jax.tree.leaves_with_path(tree):
        heads = [path[:length] for length in range(len(path), -1, -1) if path[:length] in by_path]
        if not heads:
            raise ValueError(
                f"{name} has no entry for {jax.tree_util.keystr(path)}; "
                "give it the structure of the parameters, or the top of it"
            )
        result.append(by_path[heads[0]])
    return result
