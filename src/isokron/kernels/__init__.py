"""Fused device code behind plain functions; Triton is imported only if a CUDA device is used."""

from isokron.kernels.adamw import Lists, StepCount, Tensors, adamw_
from isokron.kernels.verify import CHECKS, verified

__all__ = ["CHECKS", "Lists", "StepCount", "Tensors", "adamw_", "verified"]
