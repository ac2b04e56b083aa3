"""Fused device code behind plain functions; Triton's is imported only where a GPU is used."""

from isokron.kernels.adamw import Lists, StepCount, Tensors, adamw_

__all__ = ["Lists", "StepCount", "Tensors", "adamw_"]
