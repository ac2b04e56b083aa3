"""One engine, one file per optimizer."""

from isokron.optim.adamw import AdamW, ShardedAdamW
from isokron.optim.katie import Katie
from isokron.optim.layout import Traits
from isokron.optim.muon import Muon
from isokron.optim.natural_gradient import NaturalGradient
from isokron.optim.param_groups import describe, param_groups
from isokron.optim.preconditioned import Preconditioned
from isokron.optim.quad_skew import Quad, Skew
from isokron.optim.shampoo import Shampoo
from isokron.optim.sign import SignDescent
from isokron.optim.soap import SOAP

__all__ = [
    "SOAP",
    "AdamW",
    "Katie",
    "Muon",
    "NaturalGradient",
    "Preconditioned",
    "Quad",
    "Shampoo",
    "ShardedAdamW",
    "SignDescent",
    "Skew",
    "Traits",
    "describe",
    "param_groups",
]
