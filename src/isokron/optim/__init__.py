"""One engine, one file per optimizer."""

from isokron.optim.adamw import AdamW
from isokron.optim.describe import describe
from isokron.optim.engine import Preconditioned
from isokron.optim.katie import Katie
from isokron.optim.muon import Muon
from isokron.optim.natural import NaturalGradient
from isokron.optim.quad import Quad
from isokron.optim.routing import param_groups
from isokron.optim.shampoo import Shampoo
from isokron.optim.sharded import ShardedAdamW
from isokron.optim.sign import SignDescent
from isokron.optim.skew import Skew
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
    "describe",
    "param_groups",
]
