"""Sums in which vectors may stay what they are until it is known how ranks share them."""

from collections.abc import Callable

import torch
from torch import Tensor

from isokron.curvature.statistics import Sums

# (side, width, how many vectors this rank has) → whether they stay
Keeps = Callable[[str, int, int], bool]


class Rows(Sums):
    """Σ xxᵀ of a side, or the x themselves while `keeps` says so. rows: [B, n, d] each"""

    def __init__(self, keeps: Keeps) -> None:
        super().__init__()
        self.keeps = keeps
        self.rows: dict[str, list[Tensor]] = {}

    def gram(self, name: str, rows: Tensor) -> None:
        kept = self.rows.setdefault(name, [])
        count = rows.size(1) + sum(part.size(1) for part in kept)
        if name not in self and self.keeps(name, rows.size(2), count):
            kept.append(rows.clone())  # it may be a view of what the next pass writes to
            return
        self.fold(name)
        super().gram(name, rows)

    def fold(self, name: str) -> None:
        """Make a sum of what was kept."""
        for part in self.rows.pop(name, []):
            super().gram(name, part)

    def kept(self, name: str) -> Tensor:
        """All vectors in one. [B, n, d]"""
        if len(self.rows[name]) > 1:
            self.rows[name] = [torch.cat(self.rows[name], 1)]
        return self.rows[name][0]

    def sides(self) -> set[str]:
        """Names of all there is, summed or kept."""
        return set(self) | {name for name, parts in self.rows.items() if parts}
