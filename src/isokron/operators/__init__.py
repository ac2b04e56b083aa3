"""Structured matrices as values: factors of one side, and blocks made of them."""

from isokron.operators.factors import CholeskyInverse, Dense, Diagonal, Eigen, Identity, multiply
from isokron.operators.kron import Factor, Kron, KronEigen, ScaledKron
from isokron.operators.low_rank import (
    LowRank,
    centered_factor,
    storage_device,
    store,
    woodbury_policy,
)

__all__ = [
    "CholeskyInverse",
    "Dense",
    "Diagonal",
    "Eigen",
    "Factor",
    "Identity",
    "Kron",
    "KronEigen",
    "LowRank",
    "ScaledKron",
    "centered_factor",
    "multiply",
    "storage_device",
    "store",
    "woodbury_policy",
]
