"""Curvature of any model: what layers see → statistics → operators."""

from isokron.curvature import losses
from isokron.curvature.curvature import Curvature, side_damping
from isokron.curvature.fit import fit, planned_bytes
from isokron.curvature.hooks import Event, capture
from isokron.curvature.layers import Selection, find_layers
from isokron.curvature.losses import BinaryCrossEntropy, CrossEntropy, Likelihood, SquaredError

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Curvature",
    "Event",
    "Likelihood",
    "Selection",
    "SquaredError",
    "capture",
    "find_layers",
    "fit",
    "losses",
    "planned_bytes",
    "side_damping",
]
