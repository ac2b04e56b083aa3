"""Quad and Skew as optax transformations. Needs `pip install isokron[jax]`, and no torch."""

from isokron.jax.quad import quad, scale_by_quad
from isokron.jax.skew import scale_by_skew, skew
from isokron.jax.specs import get_opt_state_partition_specs
from isokron.jax.transform import WhiteKronState

__all__ = [
    "WhiteKronState",
    "get_opt_state_partition_specs",
    "quad",
    "scale_by_quad",
    "scale_by_skew",
    "skew",
]
