"""What may be asked of Quad and Skew, and what a tree of settings says about each leaf."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from isokron.white_kron import GROWTH_LIMIT, Plan

DTYPES = ("bfloat16", "float32", "float64")


def check_number(name: str, value: Any, rule: str, holds: Callable[[Any], bool]) -> None:
    """A number that JAX traces, as under inject_hyperparams, is taken at its word."""
    if isinstance(value, jax.core.Tracer):
        return
    array = isinstance(value, jax.Array) and value.ndim == 0
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not (array or number) or not holds(value):
        raise ValueError(f"{name} must be a number {rule}, got {value!r}")


def whole_number(name: str, value: Any, default: int) -> int:
    """A positive integer that shapes the state, and so must be known when it is made."""
    if value is None:
        return default
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{name} shapes the state and must be a Python integer, got an array; under "
            "optax.inject_hyperparams name it in static_args"
        )
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return int(value)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def check_settings(given: Mapping[str, Any]) -> None:
    """The arguments of scale_by_quad, by name."""
    check_choice("lr_style", given["lr_style"], ("adam", None))
    check_choice("apply", given["apply"], ("new", "old"))
    for name, rule, holds in (
        ("b1", "in [0, 1)", lambda x: 0 <= x < 1),
        ("preconditioner_lr", "in (0, 1]", lambda x: 0 < x <= 1),
        ("preconditioner_init_scale", "in (0, 1e6]", lambda x: 0 < x <= GROWTH_LIMIT),
        ("noise_scale", "of at least 0", lambda x: 0 <= x < float("inf")),
        ("damping", "of at least 0", lambda x: 0 <= x < float("inf")),
        ("every", "of at least 1", lambda x: 1 <= x < float("inf")),
        ("warmup", "of at least 0", lambda x: 0 <= x < float("inf")),
    ):
        check_number(name, given[name], rule, holds)
    if given["apply"] == "old" and isinstance(given["damping"], (int, float)) and given["damping"]:
        raise ValueError(
            f"damping must be 0 with apply='old', which adds no noise, got {given['damping']!r}; "
            "use apply='new'"
        )
    if given["pipeline_axis_size"] is not None:
        whole_number("pipeline_axis_size", given["pipeline_axis_size"], 1)


def check_buckets(plan: Plan, factors: Any) -> None:
    if set(plan.buckets) != set(factors):
        raise ValueError(
            f"the state has blocks {sorted(factors)} and the gradients make "
            f"{sorted(plan.buckets)}; init it with the same parameters and settings"
        )


def state_dtype(dtype: Any) -> Any:
    """None stays None: float32, or float64 where the parameters are."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES} or None, got {dtype!r}")
    if found.name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "dtype 'float64' needs 64-bit JAX; call jax.config.update('jax_enable_x64', True) first"
        )
    return found


def check_leaves(tree: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"Quad and Skew need real floating-point leaves, {jax.tree_util.keystr(path)} is "
                f"{leaf.dtype}; leave it out with optax.masked or optax.multi_transform"
            )


def scanned_leaves(tree: Any, flags: Any) -> list[bool]:
    """Which leaves are stacks of layers. No flags: none."""
    scanned = by_path("scanned_layers", tree, False if flags is None else flags)
    for (path, leaf), stacked in zip(jax.tree.leaves_with_path(tree), scanned, strict=True):
        if stacked and not leaf.shape:
            raise ValueError(
                f"scanned_layers: {jax.tree_util.keystr(path)} has no axis to stack layers on, "
                "its shape is (); flag it False"
            )
    return [bool(each) for each in scanned]


def by_path(name: str, tree: Any, values: Any) -> list[Any]:
    """The value for each leaf in a tree of values, which may end early: one for a whole subtree.

    Found by path and not by position, because optax.masked takes leaves out of the tree alone.
    """
    found = dict(jax.tree.leaves_with_path(values, is_leaf=_is_value))
    result = []
    for path, _ in jax.tree.leaves_with_path(tree):
        heads = [path[:length] for length in range(len(path), -1, -1) if path[:length] in found]
        if not heads:
            raise ValueError(
                f"{name} has no entry for {jax.tree_util.keystr(path)}; "
                "give it the structure of the parameters, or the top of it"
            )
        result.append(found[heads[0]])
    return result


def _is_value(node: Any) -> bool:
    return node is None or isinstance(node, (PartitionSpec, NamedSharding))
