"""Structured matrices as values: factors of one dimension, operators on blocks."""

from isokron.operators.factors import (
    CholeskyInverse,
    Dense,
    Diagonal,
    Identity,
)
from isokron.operators.kron import Factor, Kron, KronEigen, ScaledKron
from isokron.operators.low_rank import (
    LowRank,
    centered_factor,
    gram,
    pieces,
    storage_device,
    store,
    woodbury_policy,
)

__all__ = [
    "CholeskyInverse",
    "Dense",
    "Diagonal",
    "Factor",
    "Identity",
    "Kron",
    "KronEigen",
    "LowRank",
    "ScaledKron",
    "centered_factor",
    "gram",
    "pieces",
    "storage_device",
    "store",
    "woodbury_policy",
]
