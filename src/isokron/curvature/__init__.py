"""Curvature of any model: what layers see → statistics → operators."""

from isokron.curvature import losses
from isokron.curvature.check import check_layers
from isokron.curvature.curvature import Curvature, side_damping
from isokron.curvature.events import Event
from isokron.curvature.fit import fit, planned_bytes
from isokron.curvature.hooks import capture
from isokron.curvature.losses import BinaryCrossEntropy, CrossEntropy, Likelihood, SquaredError
from isokron.curvature.selection import Selection, find_layers

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Curvature",
    "Event",
    "Likelihood",
    "Selection",
    "SquaredError",
    "capture",
    "check_layers",
    "find_layers",
    "fit",
    "losses",
    "planned_bytes",
    "side_damping",
]
