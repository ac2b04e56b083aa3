"""Eigenbases that follow a slowly changing matrix."""

import torch
from torch import Tensor

from isokron.linalg.eigen import eigh
from isokron.linalg.threads import each, singly


def eigenbasis(matrix: Tensor) -> Tensor:
    """Eigenvectors, the largest eigenvalue's first. [..., n, n], only the lower triangle is read"""
    return eigh(matrix)[1].flip(-1)


def follow(matrix: Tensor, basis: Tensor) -> Tensor:
    """One orthogonal iteration, Q ← QR(AQ), columns by descending Rayleigh quotient. [..., n, n]

    In that order every column is freed of the larger ones and the iteration converges to the
    eigenvectors; in ascending order it does not (SOAP: 2409.11321).
    """
    if singly(matrix):
        return torch.stack(each(_follow, matrix, basis))
    return _follow(matrix, basis)


def _follow(matrix: Tensor, basis: Tensor) -> Tensor:
    peak = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    known = peak > 0  # a matrix of zeros says nothing about its eigenvectors
    image = (matrix @ basis).div_(torch.where(known, peak, 1.0))
    order = (basis * image).sum(-2, keepdim=True).argsort(dim=-1, descending=True, stable=True)
    reflections = torch.geqrf(image.take_along_dim(order, -1))
    turned = torch.linalg.householder_product(*reflections)
    return torch.where(known, turned, basis)


def offdiagonal(matrix: Tensor, basis: Tensor) -> Tensor:
    """‖QᵀAQ without its diagonal‖ / ‖A‖: how far a basis is from diagonalising. [...]"""
    peak = matrix.abs().amax((-2, -1), keepdim=True)
    turned = basis.mT @ (matrix / torch.where(peak > 0, peak, 1.0)) @ basis
    diagonal = turned.diagonal(dim1=-2, dim2=-1)
    outside = torch.linalg.matrix_norm(turned - torch.diag_embed(diagonal))
    return outside / torch.linalg.matrix_norm(turned).clamp(min=torch.finfo(turned.dtype).tiny)
