"""Learning rates: the chain of every optimizer, and multiples of its rate by path."""

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
import optax

from isokron.jax.settings import number

POSITIVE = number("a finite number above 0", lambda x: 0 < x < np.inf, traced=False)


def scale_by_path(lr_scale: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiply updates by the number of the first pattern that matches their path; else by 1.

    As `lr_scale` of torch's `isokron.param_groups`, so last in a chain or before the learning rate.

    Args:
        lr_scale: numbers by patterns of paths such as "blocks.0.up.kernel", as in
            `{"*.kernel": 1.0, "*": 4.0}`; each pattern must match a path.
    """
    if not isinstance(lr_scale, Mapping):
        raise TypeError(
            "lr_scale must be a mapping of patterns of paths to numbers, such as "
            f"{{'*.bias': 4.0}}, got {lr_scale!r}"
        )
    for pattern, multiple in lr_scale.items():
        if not isinstance(pattern, str):
            wrong = f"got {pattern!r}; write {str(pattern)!r}"
            raise TypeError(f"patterns of lr_scale must be strings, {wrong}")
        if not POSITIVE.holds(multiple):
            raise ValueError(f"lr_scale[{pattern!r}] must be {POSITIVE.text}, got {multiple!r}")
    multiples = {pattern: float(multiple) for pattern, multiple in lr_scale.items()}

    def init(params: Any) -> optax.EmptyState:
        names = [name_of(path) for path, _ in jax.tree.leaves_with_path(params)]
        for pattern in multiples:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"lr_scale pattern {pattern!r} matches no parameter; paths look like "
                    f"{', '.join(names[:3])}"
                )
        return optax.EmptyState()

    def scaled(path: Any, update: Any) -> Any:
        name = name_of(path)
        return update * next((x for p, x in multiples.items() if fnmatchcase(name, p)), 1.0)

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> Any:
        del params
        return jax.tree.map_with_path(scaled, updates), state

    return optax.GradientTransformation(init, update)


def name_of(path: Any) -> str:
    """A path as torch would write it: "blocks.0.up.kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def with_learning_rate(
    scale_by: Callable[..., optax.GradientTransformationExtraArgs],
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The optimizer that chains `scale_by`, decayed weights and the learning rate."""

    def optimizer(
        learning_rate: optax.ScalarOrSchedule = 1e-3,
        *,
        weight_decay: float = 0.1,
        weight_decay_mask: Any = None,
        lr_scale: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> optax.GradientTransformationExtraArgs:
        return optax.chain(
            scale_by(**settings),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            *([] if lr_scale is None else [scale_by_path(lr_scale)]),
            optax.scale_by_learning_rate(learning_rate),
        )

    optimizer.__name__ = optimizer.__qualname__ = scale_by.__name__.removeprefix("scale_by_")
    optimizer.__module__ = scale_by.__module__
    signature, inner = inspect.signature(optimizer), inspect.signature(scale_by)
    parameters = [*list(signature.parameters.values())[:-1], *inner.parameters.values()]
    parameters.sort(key=lambda parameter: parameter.kind)  # what is taken by position comes first
    # help() and optax.inject_hyperparams read the signature
    optimizer.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    optimizer.__doc__ = f"""{scale_by.__name__}, then decayed weights, then the learning rate.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled: W ← W − lr(P + weight_decay·W).
        weight_decay_mask: a tree of flags, or a function of the parameters: which of them decay.
        lr_scale: multiples of the learning rate by patterns of paths, see scale_by_path.
        **settings: those of {scale_by.__name__}.
    """
    return optimizer
