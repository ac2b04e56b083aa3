"""Losses that know their distribution, for `Attributor` and `isokron.curvature.fit`."""

from isokron.curvature.losses import BinaryCrossEntropy, CrossEntropy, Likelihood, SquaredError

__all__ = ["BinaryCrossEntropy", "CrossEntropy", "Likelihood", "SquaredError"]
