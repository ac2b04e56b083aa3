"""Grafting: one method's direction at another method's step length (Agarwal et al., 2002.11803).

P ← P · ‖D‖ / ‖P‖ per block, D the direction of a simple method kept beside the real one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isokron.jax.batches import Batches, Plan
from isokron.jax.moments import bias, mixed
from isokron.jax.sides import across


def graft_direction(
    grad: jax.Array,
    moment: jax.Array,
    second: jax.Array | None,
    step: jax.Array,
    group: Mapping[str, Any],
) -> tuple[jax.Array, jax.Array | None]:
    """D = m for SGD, else m / (√v + ε): AdaGrad's sum, RMSprop's mean, Adam's debiased mean; and v.

    All: [B, ...].
    """
    kind, beta2 = group["graft"], group["betas"][1]
    if second is None:
        return moment, None
    square = grad * grad
    second = second + square if kind == "adagrad" else mixed(second, square, beta2)
    seen = second / bias(beta2, step) if kind == "adam" else second
    return moment / (jnp.sqrt(seen) + group["eps"]), second


def graft(direction: jax.Array, length_of: jax.Array) -> jax.Array:
    """`direction` with, per block, the norm of `length_of`. [B, ...]"""
    peak, norm = _length(direction)
    unit = direction / across(_not_zero(peak), direction)
    return unit * across(_ratio(_length(length_of), norm), direction)


def graft_together(directions: Batches, simple: Batches, plan: Plan) -> Batches:
    """As `graft`, with lengths taken over all blocks of a leaf, in whatever batches they are."""
    owners = {name: np.array(plan.owners(name)) for name in directions}
    peak, norm = _joint_length(directions, owners, len(plan.leaves))
    ratio = _ratio(_joint_length(simple, owners, len(plan.leaves)), norm)
    peak = _not_zero(peak)
    return {
        name: each / across(peak[owners[name]], each) * across(ratio[owners[name]], each)
        for name, each in directions.items()
    }


def _length(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """max|x| and ‖x‖/max|x| of every block: squares of what is large or tiny do not fit. [B]"""
    axes = tuple(range(1, x.ndim))
    peak = jnp.max(jnp.abs(x), axis=axes)
    return peak, jnp.sqrt(jnp.sum(jnp.square(x / across(_not_zero(peak), x)), axis=axes))


def _joint_length(
    batches: Batches, owners: Mapping[str, np.ndarray], leaves: int
) -> tuple[jax.Array, jax.Array]:
    """The same of every leaf. [leaves]"""
    lengths = {name: _length(each) for name, each in batches.items()}
    dtype = next(iter(batches.values())).dtype
    top, total = jnp.zeros(leaves, dtype), jnp.zeros(leaves, dtype)
    for name, (peak, _) in lengths.items():
        top = top.at[owners[name]].max(peak)
    for name, (peak, norm) in lengths.items():
        share = peak / _not_zero(top)[owners[name]] * norm
        total = total.at[owners[name]].add(jnp.square(share))
    return top, jnp.sqrt(total)


def _ratio(wanted: tuple[jax.Array, jax.Array], norm: jax.Array) -> jax.Array:
    peak, length = wanted
    return length / _not_zero(norm) * peak


def _not_zero(values: jax.Array) -> jax.Array:
    return jnp.where(values == 0, 1, values)
