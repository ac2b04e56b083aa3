"""Which positions of a batch count in the layers that see them."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from isokron.curvature.statistics import Uses


class Masks(dict[tuple[Any, ...], Tensor | None]):
    """Positions that count in a layer, or in another that has the same input; None: all.

    A gradient that is zero but for rounding, as that of the query of a first word, which has
    nothing else to attend to, thus decides nothing: that of its value is not.
    """

    def add(self, uses: Uses) -> None:
        mask = self.get(uses.source, uses.counted)
        every = mask is None or uses.counted is None
        self[uses.source] = None if every else mask | uses.counted  # type: ignore[operator]

    def on(self, uses: Uses) -> Uses:
        return replace(uses, counted=self[uses.source]) if uses.source in self else uses
