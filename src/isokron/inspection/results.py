"""What an inspection has found, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Points = tuple[tuple[int, float], ...]  # number of an eigenvalue, from 1 for the largest, and it


@dataclass(frozen=True)
class LayerFacts:
    """One layer. blocks, outputs, inputs: of its matrix, the column of a bias included. places:
    gradients of its outputs that one example makes.

    damping: what was added to every eigenvalue. effective_rank: exp of the entropy of the
    eigenvalues. scaled_rank: the same after the diagonal of the Fisher is made 1, as the best
    diagonal preconditioner would; None where it is not a product of two sides. kept: eigenvalues
    above the damping. Spectra are thinned out; those of the sides are None where a method has none.
    """

    name: str
    kind: str
    method: str
    blocks: int
    outputs: int
    inputs: int
    bias: bool
    places: int
    bytes: int
    trace: float
    largest: float
    smallest: float
    condition: float
    damping: float
    condition_damped: float
    effective_rank: float
    scaled_rank: float | None
    kept: int
    spectrum: Points
    output_spectrum: Points | None
    input_spectrum: Points | None

    @property
    def dimension(self) -> int:
        return self.blocks * self.outputs * self.inputs

    @property
    def mean(self) -> float:
        return self.trace / self.dimension

    @property
    def share(self) -> float:
        """Of the directions, how many matter."""
        return self.effective_rank / self.dimension

    @property
    def scaled_share(self) -> float | None:
        return None if self.scaled_rank is None else self.scaled_rank / self.dimension


@dataclass(frozen=True)
class Inspection:
    """settings: all that the results depend on. terms: of the loss, over all examples fitted on.

    model_bytes: of the parameters. notes: what was left out, and what to beware of.
    """

    settings: Mapping[str, Any]
    layers: tuple[LayerFacts, ...]
    terms: int
    model_bytes: int
    loss: float
    notes: tuple[str, ...]
