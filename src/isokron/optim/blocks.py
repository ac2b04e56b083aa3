"""How a parameter of any shape becomes blocks, and how equal blocks become one batch."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isokron.cutting import Block, cut_blocks, is_matrix, split_sizes
from isokron.linalg import sent

if TYPE_CHECKING:
    from isokron.optim.shared import Shared

__all__ = ["Batch", "Block", "Observed", "Row", "cut_blocks", "is_matrix", "split_sizes"]


@dataclass(frozen=True)
class Row:
    """One row of a batch: the `number`-th block of a parameter."""

    param: Tensor
    block: Block
    number: int


class Batch:
    """Equal blocks of one group, worked on as one tensor [B, ...].

    Its rows are fixed when it is built: a missing gradient leaves a row out of a step and never
    shifts the others. `step` counts, per row, the gradients it has seen, `phase` says by how many
    steps its refreshes are shifted, `failures` how many have failed in a row, `refreshed` whether
    one has ever made an operator; they stay on the CPU so that asking what is due never waits for a
    device. `coming`: operators whose refresh has begun and does not count yet, under the names they
    have in `state`; `jobs`: who is at work on them.
    `shared`: where other processes have rows of this batch too, all of them; `rows` are then those
    owned here, perhaps none.
    """

    def __init__(self, rows: list[Row], dtype: torch.dtype, shared: "Shared | None" = None) -> None:
        self.rows, self.shared = rows, shared
        some = rows[0] if shared is None else shared.rows[0]
        self.shape = some.block.shape
        self.device = some.param.device
        self.dtype = dtype
        self.step = torch.zeros(len(rows), dtype=torch.float32, device="cpu")
        self.phase = [0] * len(rows)
        self.failures = [0] * len(rows)
        self.refreshed = [False] * len(rows)
        self.state: dict[str, Tensor] = {}
        self.coming: dict[str, Tensor] = {}
        self.jobs: dict[int, Future[dict[int, Tensor]]] = {}

    def index(self, rows: Sequence[int]) -> Tensor:
        """Numbers of rows as an index on the batch's device, sent there without waiting for it."""
        return sent(torch.tensor(rows, device="cpu"), self.device)

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.rows), *self.shape, dtype=self.dtype, device=self.device)

    def _none(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def eyes(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """An identity matrix a row. [B, size, size]"""
        eye = torch.eye(size, dtype=dtype or self.dtype, device=self.device)
        return eye.repeat(len(self.rows), 1, 1)

    def stored(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of the rows, `step` aside."""
        return {**self.state, **{f"next.{key}": value for key, value in self.coming.items()}}

    def stack(self, tensors: Sequence[Tensor], rows: Sequence[Row]) -> Tensor:
        """Read the rows' blocks of their tensors into one tensor of the batch's dtype."""
        blocks = [row.block.read(tensor) for row, tensor in zip(rows, tensors, strict=True)]
        stacked = blocks[0].unsqueeze(0) if len(blocks) == 1 else torch.stack(blocks)
        return stacked.to(self.dtype)

    def gradients(self, rows: Sequence[Row]) -> Tensor:
        """Of rows that have one. [B, ...]"""
        if self.shared is not None:
            return self.shared.arrived("grad", self._none())
        return self.stack([row.param.grad for row in rows if row.param.grad is not None], rows)

    def weights(self, rows: Sequence[Row]) -> Tensor:
        """[B, ...]"""
        if self.shared is not None:
            return self.shared.arrived("weight", self._none())
        return self.stack([row.param for row in rows], rows)

    def present(self) -> list[int]:
        """Rows whose parameter has a gradient in this step."""
        return [i for i, row in enumerate(self.rows) if row.param.grad is not None]

    def select(self, rows: Tensor | None) -> dict[str, Tensor]:
        """The state of some rows (copies), or of all (the state itself)."""
        if rows is None:
            return dict(self.state)
        return {key: value[rows] for key, value in self.state.items()}

    def put_(self, state: dict[str, Tensor], rows: Tensor | None) -> None:
        """Write back what `select` gave and a step has changed."""
        for key, value in self.state.items():
            if rows is not None:
                value[rows] = state[key]
            elif state[key] is not value:
                value.copy_(state[key])


@dataclass
class Observed:
    """A batch whose gradients have been observed, or that has none here (`grad` None).

    `present`: the rows that step; `at`: the same as an index, None for all.
    """

    batch: Batch
    present: list[int] = field(default_factory=list)
    at: Tensor | None = None
    rows: list[Row] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    grad: Tensor | None = None  # [B, ...]
