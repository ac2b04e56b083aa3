"""The two sides of an encoder: random, and whitened by the sides of curvature."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from isokron.attribution.projection import Projection
from isokron.curvature import Curvature
from isokron.curvature.sites import Site
from isokron.curvature.spectra import damped

LEAST_DIM = 8


def suggested_dim(sites: Iterable[Site], examples: int) -> int | None:
    """The p, a power of two, with which a row has at most 65,536 numbers and a store of so many
    examples at most 2 GiB in float32; None where whole gradients do."""
    shapes = [site.layout.shape for site in sites]
    most = min(2**16, 2**29 // max(1, examples))
    if sum(map(prod, shapes)) <= most:
        return None
    dim = LEAST_DIM
    while sum(b * min(o, 2 * dim) * min(i, 2 * dim) for b, o, i in shapes) <= most:
        dim *= 2
    return dim


def check_separable(method: str) -> None:
    """Refuse eigenvalues that belong to no side."""
    if method == "ekfac":
        raise ValueError(
            "a whitened projection needs curvature of two sides, and the eigenvalues of method "
            "'ekfac' belong to neither; fit method 'kfac', which drops the correction, or build a "
            "plain projection, whose queries alone are preconditioned"
        )


def random_side(
    projection: Projection | None,
    site: Site,
    side: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor | None:
    """P of a side, None where that would not be smaller. A diagonal has but one side."""
    size = site.layout.shape[1 + side]
    if projection is None or size <= projection.dim or (side == 0 and _is_diagonal(site)):
        return None
    name = ("output", "input")[side]
    return projection.matrix(site.name, name, size, dtype=dtype, device=device)[None]


def _is_diagonal(site: Site) -> bool:
    return site.view.kind == "diagonal"


def whitened_sides(
    curvature: Curvature, name: str, left: Tensor | None, right: Tensor | None, damping: float
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    found = curvature.spectrum(name)
    absolute = damping * found.mean()
    lifted, _ = damped(found, absolute, "sides", None)
    if not lifted.least() > 0:
        raise ValueError(
            f"layer {name!r} cannot be whitened, an eigenvalue is {lifted.least():.3g}; give a "
            "damping above 0"
        )
    if lifted.sides is None:  # a diagonal
        return None, right, lifted.values[0] ** -0.5
    basis, other = lifted.bases
    rest = lifted.sides.rest if lifted.others else None
    return (
        _half(left, basis, lifted.sides.left, rest),
        _half(right, other, lifted.sides.right, None),
        None,
    )


def _half(
    matrix: Tensor | None, basis: Tensor | None, values: Tensor, rest: Tensor | None
) -> Tensor:
    """P C^(−½), C of these eigenvalues; `rest`: those outside the span of a thin basis."""
    roots = values**-0.5
    if basis is None:
        return torch.diag_embed(roots) if matrix is None else matrix * roots[:, None]
    turned = basis if matrix is None else matrix @ basis
    if rest is None:
        return (turned * roots[:, None]) @ basis.mT
    outside = rest[:, None] ** -0.5
    inside = (turned * (roots[:, None] - outside)) @ basis.mT
    whole = torch.eye(basis.size(1)).to(inside) if matrix is None else matrix
    return inside + outside * whole
