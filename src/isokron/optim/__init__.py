"""One engine, one file per optimizer."""

from isokron.optim.adamw import AdamW
from isokron.optim.engine import Preconditioned
from isokron.optim.katie import Katie
from isokron.optim.muon import Muon
from isokron.optim.routing import param_groups
from isokron.optim.shampoo import Shampoo
from isokron.optim.sign import SignDescent
from isokron.optim.soap import SOAP

__all__ = [
    "SOAP",
    "AdamW",
    "Katie",
    "Muon",
    "Preconditioned",
    "Shampoo",
    "SignDescent",
    "param_groups",
]
