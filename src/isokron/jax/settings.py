"""The settings of all optimizers: defaults, validation, and values given as trees."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

GRAFTS = (None, "sgd", "adagrad", "rmsprop", "adam")
# the least value of settings that are integers, and which of them may be None or traced
LEAST = {
    "max_dim": 1,
    "block_size": 1,
    "max_size_dense": 1,
    "pipeline_axis_size": 1,
    "every": 1,
    "start": 1,
    "warmup": 0,
    "split_dim": 0,
    "steps": 0,
}
OPTIONAL = ("max_dim", "pipeline_axis_size", "start")
TRACED = ("every", "start", "warmup")

# What an optimizer does not set itself.
DEFAULTS: dict[str, Any] = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "momentum": 0.0,
    "nesterov": False,
    "graft": None,
    "factor_dtype": None,
    "state_dtype": None,
    "tolerance": 0.0,
    "every": 1,
    "start": None,
    "warmup": 0,
    "max_dim": None,
    "vectors": False,
    "stacked": 0,
    "split": None,
    "split_dim": 0,
    "max_size_dense": 16384,
    "preconditioner_lr_floor": 0.4,
    "pipeline_axis_name": None,
    "pipeline_axis_size": None,
    "params_partition_specs": None,
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
    split: tuple[int, ...] | int | None  # parts of a fused projection: sizes, or how many
    split_dim: int  # the dimension of one matrix along which `split` cuts


class FactorSettings(LayoutSettings, total=False):
    """Further settings of Shampoo, SOAP and Katie."""

    eps: float  # ε beside the root of a second moment
    momentum: float  # of a heavy ball on the update
    nesterov: bool  # whether that looks ahead
    factor_dtype: Any  # of the factors' statistics; by default that of the state
    warmup: int  # steps at first that each refresh; `start` and `every` count from there
    vectors: bool  # whether the method steps vectors too


class ShampooSettings(FactorSettings, total=False):
    """Those of Shampoo."""

    tolerance: float  # with form="eigen": relative error up to which a basis is not refreshed


class WhiteKronSettings(TypedDict, total=False):
    """Further settings of Quad and Skew."""

    stacked: Any  # as in LayoutSettings; flags of leaves that stack layers on axis 0 will do
    max_size_dense: int  # longer dimensions are not cut and have a diagonal factor
    preconditioner_lr_floor: float  # that `preconditioner_lr` decays to
    warmup: int  # steps at first that each update the factors; `every` counts from there
    pipeline_axis_name: str | None  # mesh axis over which blocks are spread
    pipeline_axis_size: int | None  # its size, where there is no mesh to ask
    params_partition_specs: Any  # how parameters are sharded, where their types do not tell


def settle(
    optimizer: str,
    arguments: Mapping[str, Any],
    kind: type,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """All settings of an optimizer as plain values, checked.

    Args:
        optimizer: its name, for errors.
        arguments: locals() of its constructor, whose **shared are those of `kind`.
        kind: the TypedDict of its further settings.
        aliases: other libraries' names for settings, and ours.
    """
    named = {name: value for name, value in arguments.items() if name != "shared"}
    # optax.inject_hyperparams passes **shared on as one argument of that name
    shared = {**arguments["shared"], **arguments["shared"].get("shared", {})}
    shared.pop("shared", None)
    shared = {(aliases or {}).get(name, name): value for name, value in shared.items()}
    allowed = {*named, *kind.__annotations__}
    for name in shared:
        if name not in allowed:
            raise TypeError(f"{optimizer} has no setting {name!r}; it has {sorted(allowed)}")
    settings = {
        name: value.value if isinstance(value, Static) else value
        for name, value in {**DEFAULTS, **named, **shared}.items()
    }
    _check(settings)
    return {"optimizer": optimizer, **settings}


def with_learning_rate(
    scale_by: Callable[..., optax.GradientTransformationExtraArgs],
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The optimizer of a mechanism: `scale_by`, decayed weights, learning rate."""

    def optimizer(
        learning_rate: optax.ScalarOrSchedule = 1e-2,
        *,
        weight_decay: float = 0.1,
        weight_decay_mask: Any = None,
        **settings: Any,
    ) -> optax.GradientTransformationExtraArgs:
        return optax.chain(
            scale_by(**settings),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )

    ours, theirs = inspect.signature(optimizer), inspect.signature(scale_by)
    parameters = [*list(ours.parameters.values())[:-1], *theirs.parameters.values()]
    name = scale_by.__name__.removeprefix("scale_by_")
    optimizer.__name__ = optimizer.__qualname__ = name
    optimizer.__module__ = scale_by.__module__
    # help() and optax.inject_hyperparams read the signature
    optimizer.__signature__ = ours.replace(parameters=parameters)  # type: ignore[attr-defined]
    optimizer.__doc__ = f"""{scale_by.__name__}, then decayed weights, then the learning rate.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled: W ← W − lr(P + weight_decay·W).
        weight_decay_mask: a tree of flags, or a function of the parameters: which of them decay.
        **settings: those of {scale_by.__name__}.
    """
    return optimizer


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


def refresh_due(count: jax.Array, settings: Mapping[str, Any]) -> jax.Array | bool:
    """Whether operators are refreshed in this step.

    In each of the first `warmup` steps; then, counted from there, at start, start·2, start·4, …
    below `every`, and at every multiple of it.
    """
    start, every, warmup = first_refresh(settings), settings["every"], settings["warmup"]
    if isinstance(start, int) and isinstance(every, int) and start == every == 1:
        return True
    step = count - warmup
    times = step // start
    doubled = (step % start == 0) & (times & (times - 1) == 0)
    later = jnp.where(step < every, doubled, step % every == 0)
    return jnp.where(step <= start, step == start, later) | (step <= 0)


def check_number(name: str, value: Any, rule: str, holds: Callable[[Any], bool]) -> None:
    """Raise unless `value` is a number for which `holds`. Traced numbers cannot be checked."""
    if isinstance(value, jax.core.Tracer):
        return
    array = isinstance(value, jax.Array) and value.ndim == 0
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not (array or number) or not holds(value):
        raise ValueError(f"{name} must be a number {rule}, got {value!r}")


def check_not_negative(name: str, value: Any) -> None:
    check_number(name, value, "of at least 0", lambda x: 0 <= x < float("inf"))


def check_above_zero(name: str, value: Any) -> None:
    check_number(name, value, "above 0", lambda x: 0 < x < float("inf"))


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def check_floating(name: str, dtype: Any) -> None:
    try:
        fits = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must be None or a floating-point dtype, got {dtype!r}")


def check_factor_beta(settings: Mapping[str, Any], sums: bool = False) -> None:
    """`sums`: whether β may be 1, which sums as AdaGrad does."""
    if settings["factor_beta"] is not None:
        rule = "in [0, 1]" if sums else "in [0, 1)"
        check_number(
            "factor_beta", settings["factor_beta"], rule, lambda x: 0 <= x < 1 or (sums and x == 1)
        )


def _check(settings: Mapping[str, Any]) -> None:
    betas = settings["betas"]
    if not (isinstance(betas, Sequence) and len(betas) == 2):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for beta in betas:
        check_number("betas", beta, "in [0, 1) each", lambda x: 0 <= x < 1)
    check_number("momentum", settings["momentum"], "in [0, 1)", lambda x: 0 <= x < 1)
    check_not_negative("eps", settings["eps"])
    check_not_negative("tolerance", settings["tolerance"])
    check_choice("graft", settings["graft"], GRAFTS)
    check_floating("factor_dtype", settings["factor_dtype"])
    for name in ("vectors", "nesterov"):
        if not isinstance(settings[name], bool):
            raise ValueError(f"{name} must be True or False, got {settings[name]!r}")
    if settings["nesterov"] and is_zero(settings["momentum"]):
        raise ValueError(
            "nesterov must be False where momentum is 0, got True; there is nothing to look ahead "
            "with, give a momentum"
        )
    for name, least in LEAST.items():
        if name in settings and not (name in OPTIONAL and settings[name] is None):
            _check_integer(name, settings[name], least, "None or " if name in OPTIONAL else "")


def _check_integer(name: str, value: Any, least: int, also: str) -> None:
    if isinstance(value, jax.Array):
        if name in TRACED:
            return
        raise ValueError(
            f"{name} shapes what is computed and must be a Python integer, got an array; under "
            "optax.inject_hyperparams name it in static_args"
        )
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be {also}an integer of at least {least}, got {value!r}")


def values_by_path(name: str, tree: Any, values: Any) -> list[Any]:
    """The value for each leaf in a tree of values, which may end early: one for a whole subtree.

    Found by path and not by position, because optax.masked takes leaves out of the tree alone.
    """
    by_path = dict(jax.tree.leaves_with_path(values, is_leaf=_is_value))
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


def _is_value(node: Any) -> bool:
    return node is None or isinstance(node, (PartitionSpec, NamedSharding))
