"""Curvature of any model: what a layer shows → statistics → operators."""

from isokron.curvature.capture import Event, capture
from isokron.curvature.curvature import Curvature
from isokron.curvature.fit import fit
from isokron.curvature.likelihoods import BinaryCrossEntropy, CrossEntropy, Likelihood, SquaredError
from isokron.curvature.products import (
    fisher_vector_product,
    ggn_vector_product,
    hessian_vector_product,
)

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Curvature",
    "Event",
    "Likelihood",
    "SquaredError",
    "capture",
    "fisher_vector_product",
    "fit",
    "ggn_vector_product",
    "hessian_vector_product",
]
