"""Fused device code behind plain functions."""

from isokron.kernels.adamw import Lists, Table, Tensors, adamw_, library_for, status

__all__ = ["Lists", "Table", "Tensors", "adamw_", "library_for", "status"]
