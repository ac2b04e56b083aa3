"""Batched matrix functions on plain tensors."""

from isokron.linalg.bases import eigenbasis, follow, offdiagonal
from isokron.linalg.cholesky import Cholesky, factorize
from isokron.linalg.condition import Lifted, lift
from isokron.linalg.eigen import eigh
from isokron.linalg.gram import gram_, mirror_, symmetric_product, unfold
from isokron.linalg.host import on_host, sent, surely_all
from isokron.linalg.norm_bound import norm_bound
from isokron.linalg.polar import newton_schulz
from isokron.linalg.roots import inverse_power, inverse_root

__all__ = [
    "Cholesky",
    "Lifted",
    "eigenbasis",
    "eigh",
    "factorize",
    "follow",
    "gram_",
    "inverse_power",
    "inverse_root",
    "lift",
    "mirror_",
    "newton_schulz",
    "norm_bound",
    "offdiagonal",
    "on_host",
    "sent",
    "surely_all",
    "symmetric_product",
    "unfold",
]
