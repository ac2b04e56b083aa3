"""Curvature of any model: what a layer shows → statistics → operators."""

from isokron.curvature.capture import Event, capture
from isokron.curvature.curvature import Curvature
from isokron.curvature.fit import fit
from isokron.curvature.likelihoods import BinaryCrossEntropy, CrossEntropy, Likelihood, SquaredError

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Curvature",
    "Event",
    "Likelihood",
    "SquaredError",
    "capture",
    "fit",
]
