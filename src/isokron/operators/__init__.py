"""Structured matrices as values: factors of one side, and blocks made of them."""

from isokron.operators.factors import (
    CholeskyInverse,
    Dense,
    Diagonal,
    Eigen,
    Identity,
    multiply,
)
from isokron.operators.kron import Factor, Kron, KronEigen, KronThin, ScaledKron
from isokron.operators.lowrank import LowRank
from isokron.operators.storage import storage_device, store
from isokron.operators.woodbury import (
    centered_factor,
    gradient_factor,
    push_through,
    softmax_factor,
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
    "KronThin",
    "LowRank",
    "ScaledKron",
    "centered_factor",
    "gradient_factor",
    "multiply",
    "push_through",
    "softmax_factor",
    "storage_device",
    "store",
    "woodbury_policy",
]
