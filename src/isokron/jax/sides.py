"""Second moments of a block along each of its dimensions, and matrices that act on one.

F_i ← β F_i + (1−β) X_(i) X_(i)ᵀ, X_(i) the block with dimension i as rows; a plain sum at β = 1.
In the state they are "cov.0", "cov.1", …; sides without one have no factor.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isokron.jax.moments import bias

State = dict[str, jax.Array]


def preconditioned_sides(shape: Sequence[int], group: Mapping[str, Any]) -> list[int]:
    """Dimensions that get a factor: all but those that are kept whole above `max_dim`."""
    longest = group["max_dim"]
    return [i for i, size in enumerate(shape) if longest is None or size <= longest]


def eyes(rows: int, size: int, dtype: Any) -> jax.Array:
    """An identity matrix a row. [B, size, size]"""
    return jnp.tile(jnp.eye(size, dtype=dtype), (rows, 1, 1))


def zero_covariances(
    rows: int, shape: Sequence[int], sides: Iterable[int], dtype: Any, group: Mapping[str, Any]
) -> State:
    kept = group["factor_dtype"] or dtype
    return {f"cov.{i}": jnp.zeros((rows, shape[i], shape[i]), kept) for i in sides}


def sides_of(state: Mapping[str, jax.Array]) -> list[int]:
    return sorted(int(key[4:]) for key in state if key.startswith("cov."))


def observed(cov: jax.Array, x: jax.Array, side: int, beta: Any, scale: float = 1.0) -> jax.Array:
    """The covariance of one side of x [B, ...], with x folded in. [B, d, d]"""
    x = jnp.moveaxis(x.astype(cov.dtype), side + 1, 1)
    rows = x.reshape(*x.shape[:2], -1)
    weight = scale * jnp.where(beta < 1, 1 - beta, 1)
    return (beta * cov + weight * (rows @ rows.mT)).astype(cov.dtype)


def debiased(state: Mapping[str, jax.Array], side: int, beta: Any, step: jax.Array) -> jax.Array:
    """F̂ = F/(1−βᵗ). [B, d, d]"""
    cov = state[f"cov.{side}"]
    return cov / jnp.where(beta < 1, bias(beta, step), 1).astype(cov.dtype)


def known_only(fresh: Mapping[str, jax.Array], state: Mapping[str, jax.Array]) -> State:
    """The new operator where a gradient has been seen, else the old: zeros say nothing. [B, ...]"""
    result = {}
    for key, value in fresh.items():
        cov = state[f"cov.{key.rpartition('.')[2]}"]
        known = jnp.trace(cov, axis1=-2, axis2=-1) != 0
        value = value.astype(state[key].dtype)
        result[key] = jnp.where(across(known, value), value, state[key])
    return result


def multiply(x: jax.Array, matrix: jax.Array, side: int) -> jax.Array:
    """x ×_i A: y[b, .., i, ..] = Σ_j A[b, i, j] x[b, .., j, ..]. [B, d₁, …], [B, d, d]"""
    turned = jnp.einsum("bij,bj...->bi...", matrix, jnp.moveaxis(x, side + 1, 1))
    return jnp.moveaxis(turned, 1, side + 1)


def along(values: jax.Array, x: jax.Array, side: int) -> jax.Array:
    """values [B, d] shaped to scale x [B, d₁, …] along one side."""
    others = [axis for axis in range(1, x.ndim) if axis != side + 1]
    return jnp.expand_dims(values, others)


def across(values: jax.Array, x: jax.Array) -> jax.Array:
    """One value a block, [B], shaped to broadcast over x [B, ...]."""
    return jnp.expand_dims(values, tuple(range(1, x.ndim)))
