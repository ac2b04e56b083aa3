"""How a parameter of any shape becomes blocks, and how equal blocks become one batch."""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Block:
    """One block of a parameter: index it, view the part as `merged`, cut that.

    `part`: which part of the parameter this is; blocks of one part have the same index.
    """

    part: int
    index: Index
    merged: tuple[int, ...]
    cut: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            len(range(size)[piece]) for size, piece in zip(self.merged, self.cut, strict=True)
        )

    def view(self, tensor: Tensor) -> Tensor:
        """The block as a view of `tensor`; RuntimeError where its strides do not allow one."""
        return tensor[self.index].view(self.merged)[self.cut]

    def read(self, tensor: Tensor) -> Tensor:
        """The block, copied only where the strides of `tensor` force it."""
        return tensor[self.index].reshape(self.merged)[self.cut]


def is_matrix(shape: Sequence[int], stacked: int = 0) -> bool:
    """Whether, past the stacking dimensions, more than one dimension is left."""
    return sum(size != 1 for size in shape[stacked:]) >= 2


def merge_dims(
    shape: Sequence[int], max_dim: int | None = None, order: int | None = None
) -> tuple[int, ...]:
    """Drop ones and merge small neighbours, from the last backwards, while ≤ `max_dim`.

    A matrix never becomes a vector. `order`: merge on from the last, whatever the size, until so
    few dimensions are left. (256, 128, 3, 3) is (256, 128, 9) at max_dim 1024, (256, 1152) at
    order 2.
    """
    dims = [size for size in shape if size != 1]
    merged: list[int] = []
    while dims:
        size = dims.pop()
        dims_left = len(dims) + len(merged) + 1
        fits = max_dim is not None and bool(merged) and size * merged[0] <= max_dim
        too_many = order is not None and dims_left > order
        if merged and ((fits and dims_left > 2) or too_many):
            merged[0] *= size
        else:
            merged.insert(0, size)
    return tuple(merged)


def cut_blocks(
    shape: Sequence[int],
    *,
    max_dim: int | None = None,
    oversize: str = "cut",
    order: int | None = None,
    stacked: int = 0,
    split: Sequence[int] | int | None = None,
    split_dim: int = 0,
) -> list[Block]:
    """All blocks of a parameter of this shape.

    `oversize`: whether dimensions above `max_dim` are "cut" or, by "identity", stay whole.
    `stacked`: so many leading dimensions count matrices ([experts, m, n] has stacked=1).
    `split`: sizes (or a number of equal parts) of a fused projection along `split_dim` of one
    matrix, so that query, key and value are blocks of their own.
    """
    inner = tuple(shape[stacked:])
    lengths = split_sizes(inner, split, split_dim)
    longest = max_dim if oversize == "cut" else None
    whole = slice(None)
    parts = itertools.count()
    blocks = []
    for lead in itertools.product(*map(range, shape[:stacked])):
        for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
            narrow: Index = ()
            part = inner
            if split is not None:
                narrow = (whole,) * split_dim + (slice(start, start + length),)
                part = (*inner[:split_dim], length, *inner[split_dim + 1 :])
            merged = merge_dims(part, max_dim, order)
            if is_matrix(inner):  # a part of one row is a matrix of one row
                merged = (1,) * (2 - len(merged)) + merged
            cuts = itertools.product(*(_pieces(size, longest) for size in merged))
            number = next(parts)
            blocks += [Block(number, (*lead, *narrow), merged, cut) for cut in cuts]
    return blocks


def split_sizes(shape: Sequence[int], split: Sequence[int] | int | None, dim: int) -> list[int]:
    """The lengths of the parts along `dim`, checked against the shape."""
    if split is None:
        return [shape[dim] if shape else 1]
    if dim >= len(shape):
        raise ValueError(f"split_dim {dim} is not a dimension of shape {tuple(shape)}")
    if isinstance(split, int):
        if split < 1 or shape[dim] % split:
            raise ValueError(
                f"split={split} must divide dimension {dim} of shape {tuple(shape)}; "
                "give the sizes of the parts instead"
            )
        return [shape[dim] // split] * split
    if sum(split) != shape[dim] or min(split, default=0) < 1:
        raise ValueError(
            f"split={tuple(split)} must be positive sizes that sum to {shape[dim]}, "
            f"dimension {dim} of shape {tuple(shape)}"
        )
    return list(split)


def _pieces(size: int, max_dim: int | None) -> list[slice]:
    if max_dim is None:
        return [slice(0, size)]
    return [slice(start, min(start + max_dim, size)) for start in range(0, size, max_dim)]


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
    steps its refreshes are shifted, `failures` how many have failed in a row; they stay on the CPU
    so that asking what is due never waits for a device. `coming`: operators whose refresh has begun
    and does not count yet, under the names they have in `state`; `jobs`: who is at work on them.
    """

    def __init__(self, rows: list[Row], dtype: torch.dtype) -> None:
        self.rows = rows
        self.shape = rows[0].block.shape
        self.device = rows[0].param.device
        self.dtype = dtype
        self.step = torch.zeros(len(rows), dtype=torch.float32, device="cpu")
        self.phase = [0] * len(rows)
        self.failures = [0] * len(rows)
        self.state: dict[str, Tensor] = {}
        self.coming: dict[str, Tensor] = {}
        self.jobs: dict[int, Future[dict[int, bool]]] = {}

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.rows), *self.shape, dtype=self.dtype, device=self.device)

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
