"""Fused device code behind plain functions; Triton's is imported only where a GPU is used."""

from isokron.kernels.adamw import Lists, Table, Tensors, adamw_, library_for, status

__all__ = ["Lists", "Table", "Tensors", "adamw_", "library_for", "status"]
