"""From curvature to facts: one record a layer, its spectra thinned out for plots."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isokron.curvature import Curvature
from isokron.curvature.layer import Layer
from isokron.inspection.results import LayerFacts, Points

POINTS = 200  # of a spectrum, geometrically spread


def layer_facts(
    curvature: Curvature, damping: float, places: Mapping[str, int]
) -> tuple[LayerFacts, ...]:
    """All layers. damping: a multiple of each one's mean eigenvalue; places: see LayerFacts."""
    damped = curvature.power(1.0, damping, relative=True).report(spectra=False)
    found = []
    for record, after in zip(curvature.report(), damped, strict=True):
        name = record["layer"]
        spectrum = curvature.spectrum(name)
        values = spectrum.values.double().clamp_min(0)
        sides = spectrum.sides
        found.append(
            LayerFacts(
                name,
                record["kind"],
                record["method"],
                record["blocks"],
                record["outputs"],
                record["inputs"],
                record["bias"],
                places[name],
                record["bytes"],
                record["trace"],
                float(values.max()),
                float(values.min()),
                record["condition"],
                after["damping"],
                after["condition_after"],
                record["effective_rank"],
                None if sides is None else scaled_rank(curvature.layers[name]),
                int((values > after["damping"]).sum()),
                thinned(values),
                None if sides is None else thinned(sides.left.double()),
                None if sides is None else thinned(sides.right.double()),
            )
        )
    return tuple(found)


def thinned(values: Tensor, count: int = POINTS) -> Points:
    """Eigenvalues in falling order, those above 0, at about `count` numbers 1 … n."""
    ordered = values.flatten().sort(descending=True).values
    n = int((ordered > 0).sum())
    if n == 0:
        return ()
    numbers = sorted({round(n ** (i / (count - 1))) for i in range(count)})
    picked = ordered[torch.tensor(numbers) - 1].tolist()
    # four digits are more than a plot can show
    return tuple(
        (number, float(f"{value:.4g}")) for number, value in zip(numbers, picked, strict=True)
    )


def scaled_rank(layer: Layer) -> float | None:
    """Effective rank of D^-½ (G ⊗ A) D^-½, D the diagonal: what diagonal scaling leaves.

    It is the product of both sides' correlation matrices. None where these are not kept.
    """
    known = layer.statistics
    if not {"output", "input"} <= set(known):
        return None
    left = _correlated(known["output"])  # [B, o]
    right = _correlated(known["input"])  # [B, i]
    return effective_rank(left[:, :, None] * right[:, None, :])


def effective_rank(values: Tensor) -> float:
    """exp(−Σ p log p), p the eigenvalues over their sum."""
    p = values.double().clamp_min(0).flatten()
    total = p.sum()
    if not total > 0:
        return 0.0
    p = p[p > 0] / total
    return float((-(p * p.log()).sum()).exp())


def _correlated(side: Tensor) -> Tensor:
    """Eigenvalues of the correlations of a covariance; a unit that is always 0 has none."""
    if side.ndim == 2:  # uncorrelated columns, by their counts
        return (side > 0).double()
    side = side.double()
    diagonal = side.diagonal(dim1=1, dim2=2)
    root = torch.where(diagonal > 0, diagonal.clamp_min(1e-300).rsqrt(), 0.0)
    return torch.linalg.eigvalsh(side * root[:, :, None] * root[:, None, :])
