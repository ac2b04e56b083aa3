"""Fused device code behind plain functions; Triton's is imported only where a GPU is used."""

from isokron.kernels.adamw import Table, adamw_
from isokron.kernels.adamw_native import Lists, Tensors, library_for, status

__all__ = ["Lists", "Table", "Tensors", "adamw_", "library_for", "status"]
