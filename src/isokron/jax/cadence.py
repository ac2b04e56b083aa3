"""When operators are made anew: at `start`, ever less often, then every so many steps.

As isokron.optim.cadence has it, for steps that JAX traces.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def first(group: Mapping[str, Any]) -> Any:
    return group["every"] if group["start"] is None else group["start"]


def due(step: jax.Array, group: Mapping[str, Any]) -> jax.Array | bool:
    """Whether they are in step t: start, start·2, start·4, … < every, or t mod every = 0."""
    start, every = first(group), group["every"]
    if isinstance(start, int) and isinstance(every, int) and start == every == 1:
        return True
    times = step // start
    doubled = (step % start == 0) & (times & (times - 1) == 0)
    later = jnp.where(step < every, doubled, step % every == 0)
    return jnp.where(step <= start, step == start, later)


def unready(step: jax.Array, group: Mapping[str, Any]) -> jax.Array:
    """Whether there is no operator yet."""
    return step < first(group)
