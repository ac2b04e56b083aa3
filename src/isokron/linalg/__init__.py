"""Batched matrix functions on plain tensors."""

from isokron.linalg.cholesky import Cholesky, factorize
from isokron.linalg.conjugate_gradient import conjugate_gradient
from isokron.linalg.device_transfer import on_host, sent, surely_all
from isokron.linalg.eigen import Lifted, eigenbasis, eigh, follow, lift, offdiagonal
from isokron.linalg.norm_bound import norm_bound
from isokron.linalg.polar import newton_schulz, quickest
from isokron.linalg.products import (
    along,
    gram_,
    halved,
    mirror_,
    multiply,
    symmetric_product,
    unfold,
    unhalve_,
)
from isokron.linalg.roots import inverse_power, inverse_root
from isokron.linalg.threads import compute_alone

__all__ = [
    "Cholesky",
    "Lifted",
    "along",
    "compute_alone",
    "conjugate_gradient",
    "eigenbasis",
    "eigh",
    "factorize",
    "follow",
    "gram_",
    "halved",
    "inverse_power",
    "inverse_root",
    "lift",
    "mirror_",
    "multiply",
    "newton_schulz",
    "norm_bound",
    "offdiagonal",
    "on_host",
    "quickest",
    "sent",
    "surely_all",
    "symmetric_product",
    "unfold",
    "unhalve_",
]
