"""What SOAP, Shampoo, Katie and Muon have in common to be set, and what makes it wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from isokron.jax.checks import check_choice, check_number

GRAFTS = (None, "sgd", "adagrad", "rmsprop", "adam")
LEAST = {"max_dim": 1, "every": 1, "start": 1, "split_dim": 0, "steps": 0}
TRACED = ("every", "start")  # numbers that no shape depends on


@dataclass(frozen=True)
class Static:
    """A default on which shapes depend. optax.inject_hyperparams makes arrays of plain numbers."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


# An optimizer's own arguments override these.
SHARED: dict[str, Any] = {
    "max_dim": None,
    "oversize": "cut",
    "vectors": False,
    "momentum": 0.0,
    "dampening": 0.0,
    "nesterov": False,
    "beta3": None,
    "graft_by": "block",
    "every": 1,
    "start": None,
}


def settled(optimizer: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings an optimizer was made with, as plain values, checked."""
    group = {
        name: value.value if isinstance(value, Static) else value
        for name, value in {**SHARED, **given}.items()
    }
    _check(group)
    return {"optimizer": optimizer, **group}


def in_dtype(group: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The same, with numbers that are arrays in the dtype that is worked in."""
    return {
        name: value.astype(dtype)
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
        else value
        for name, value in group.items()
    }


def is_zero(value: Any) -> bool:
    """Whether a setting is known to be 0; a traced one may be anything."""
    return isinstance(value, (int, float)) and value == 0


def check_factors(group: Mapping[str, Any], sums: bool = False) -> None:
    """What methods with one factor a dimension have in common; `sums`: whether β may be 1."""
    if group["factor_beta"] is not None:
        rule = "in [0, 1]" if sums else "in [0, 1)"
        check_number(
            "factor_beta", group["factor_beta"], rule, lambda x: 0 <= x < 1 or (sums and x == 1)
        )
    check_floating("factor_dtype", group["factor_dtype"])


def check_floating(name: str, dtype: Any) -> None:
    try:
        fits = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must be None or a floating-point dtype, got {dtype!r}")


def check_not_negative(name: str, value: Any) -> None:
    check_number(name, value, "of at least 0", lambda x: 0 <= x < float("inf"))


def check_above_zero(name: str, value: Any) -> None:
    check_number(name, value, "above 0", lambda x: 0 < x < float("inf"))


def _check(group: Mapping[str, Any]) -> None:
    betas = group["betas"]
    if not (isinstance(betas, Sequence) and len(betas) == 2):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for beta in betas:
        check_number("betas", beta, "in [0, 1) each", lambda x: 0 <= x < 1)
    check_not_negative("eps", group["eps"])
    for name in ("momentum", "dampening"):
        check_number(name, group[name], "in [0, 1)", lambda x: 0 <= x < 1)
    if group["beta3"] is not None:
        check_number("beta3", group["beta3"], "in [0, 1), or None", lambda x: 0 <= x < 1)
    check_choice("graft", group["graft"], GRAFTS)
    check_choice("graft_by", group["graft_by"], ("block", "parameter"))
    check_choice("oversize", group["oversize"], ("cut", "identity"))
    for name in ("vectors", "nesterov"):
        if not isinstance(group[name], bool):
            raise ValueError(f"{name} must be True or False, got {group[name]!r}")
    if group["nesterov"] and is_zero(group["momentum"]):
        raise ValueError(
            "nesterov must be False where momentum is 0, got True; there is nothing to look ahead "
            "with, give a momentum"
        )
    for name, least in LEAST.items():
        optional = name in ("max_dim", "start")
        if name in group and not (optional and group[name] is None):
            _check_whole(name, group[name], least, "None or " if optional else "")


def _check_whole(name: str, value: Any, least: int, also: str) -> None:
    if isinstance(value, jax.Array):
        if name in TRACED:
            return
        raise ValueError(
            f"{name} shapes what is computed and must be a Python integer, got an array; under "
            "optax.inject_hyperparams name it in static_args"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be {also}an integer of at least {least}, got {value!r}")
