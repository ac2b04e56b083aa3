"""Structured matrices as values: factors of one side, and blocks made of them."""

from isokron.operators.factors import Dense, Diagonal, Eigen, Factor, Identity, multiply
from isokron.operators.kron import Kron, KronEigen, ScaledKron

__all__ = [
    "Dense",
    "Diagonal",
    "Eigen",
    "Factor",
    "Identity",
    "Kron",
    "KronEigen",
    "ScaledKron",
    "multiply",
]
