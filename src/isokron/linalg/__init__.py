"""Batched matrix functions on plain tensors."""

from isokron.linalg.polar import POLYNOMIALS, newton_schulz

__all__ = ["POLYNOMIALS", "newton_schulz"]
