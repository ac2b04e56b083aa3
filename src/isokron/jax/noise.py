"""Probes and noise: fixed numbers, or normals drawn from a key and the step."""

from typing import Any

import jax
import jax.numpy as jnp

from isokron.white_kron import PROBES, Shape, scramble, uniform


def probe_rows(size: int, key: jax.Array | None, dtype: Any) -> jax.Array:
    """[4, size], of mean square 1."""
    if key is not None:
        return jax.random.normal(jax.random.fold_in(key, size), (PROBES, size), dtype)
    return fixed((PROBES, size), dtype)


def noise(shape: Shape, key: jax.Array | None, dtype: Any) -> jax.Array:
    """Of full rank and mean square 1; the same for all blocks of a shape. [m, n] or [n]"""
    if key is not None:
        return jax.random.normal(jax.random.fold_in(key, shape[0]), shape, dtype)
    return fixed(shape, dtype)


def fixed(shape: Shape, dtype: Any) -> jax.Array:
    """Integers, because cosines and the like take long to compile."""
    row = jnp.arange(shape[0], dtype=jnp.uint32)[:, None] if len(shape) == 2 else jnp.uint32(0)
    bits = scramble(row, jnp.arange(shape[-1], dtype=jnp.uint32))
    return uniform(bits.astype(dtype))


def step_key(key: Any, count: jax.Array) -> jax.Array | None:
    """The key of this step. `key`: one of either style, or an integer to make one from."""
    if key is None:
        return None
    is_key = isinstance(key, jax.Array) and (
        key.ndim == 1 or jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    )
    return jax.random.fold_in(key if is_key else jax.random.key(key), count)
