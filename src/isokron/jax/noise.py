"""Probes and noise: fixed waves, or normals drawn from a key and the step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isokron.white_kron import PROBES, Shape, wave


def probe_rows(size: int, key: jax.Array | None, dtype: Any) -> jax.Array:
    """[4, size], of mean square 1."""
    if key is not None:
        return jax.random.normal(jax.random.fold_in(key, size), (PROBES, size), dtype)
    return jnp.asarray(wave(np.arange(PROBES)[:, None], np.arange(size), np.cos), dtype)


def noise(shape: Shape, key: jax.Array | None, dtype: Any) -> jax.Array:
    """Of full rank and mean square 1; the same for all blocks of a shape. [m, n] or [n]"""
    if key is not None:
        return jax.random.normal(jax.random.fold_in(key, shape[0]), shape, dtype)
    # made on the device: for a long diagonal side it would be a large constant in the program
    rows, columns = jnp.arange(shape[0], dtype=dtype), jnp.arange(shape[-1], dtype=dtype)
    return wave(rows[:, None] if len(shape) == 2 else 0, columns, jnp.cos)


def step_key(key: Any, count: jax.Array) -> jax.Array | None:
    """The key of this step. `key`: one of either style, or an integer to make one from."""
    if key is None:
        return None
    is_key = isinstance(key, jax.Array) and (
        key.ndim == 1 or jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    )
    return jax.random.fold_in(key if is_key else jax.random.key(key), count)
