"""Quad, Skew, SOAP, Shampoo, Katie and Muon as optax transformations.

Needs `pip install isokron[jax]`, and no torch.
"""

from importlib.util import find_spec

if find_spec("jax") is None or find_spec("optax") is None:
    raise ModuleNotFoundError("isokron.jax needs jax and optax; run: pip install 'isokron[jax]'")

from isokron.jax.katie import katie, scale_by_katie
from isokron.jax.learning_rate import scale_by_path
from isokron.jax.linalg import newton_schulz
from isokron.jax.muon import muon, scale_by_muon
from isokron.jax.quad_skew import quad, scale_by_quad, scale_by_skew, skew
from isokron.jax.shampoo import scale_by_shampoo, shampoo
from isokron.jax.sharding import get_opt_state_partition_specs
from isokron.jax.soap import scale_by_soap, soap
from isokron.jax.transform import PreconditionedState

__all__ = [
    "PreconditionedState",
    "get_opt_state_partition_specs",
    "katie",
    "muon",
    "newton_schulz",
    "quad",
    "scale_by_katie",
    "scale_by_muon",
    "scale_by_path",
    "scale_by_quad",
    "scale_by_shampoo",
    "scale_by_skew",
    "scale_by_soap",
    "shampoo",
    "skew",
    "soap",
]
