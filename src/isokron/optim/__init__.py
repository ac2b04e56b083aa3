"""One engine, one file per optimizer."""

from isokron.optim.adamw import AdamW
from isokron.optim.engine import Preconditioned
from isokron.optim.muon import Muon
from isokron.optim.routing import param_groups
from isokron.optim.sign import SignDescent

__all__ = ["AdamW", "Muon", "Preconditioned", "SignDescent", "param_groups"]
