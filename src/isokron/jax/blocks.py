"""Leaves of any shape to batches of equal blocks and back, and reductions over layers.

A leaf is a stack of layers, each cut into blocks by isokron.block_layout. Leaves of one shape are
stacked and cut together, and all blocks of one shape are one batch, so that the compiled program
grows with the number of shapes and not with the number of leaves.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isokron.block_layout import Grid, Part, cut_grids, cut_parts, is_matrix
from isokron.jax.linalg import across, nonzero, norms
from isokron.jax.settings import values_by_path

Arrays = dict[str, jax.Array]  # by the name of a batch
Settings = Mapping[str, Any]

# Blocks are padded with zeros to the shape of a larger batch while all padding together costs at
# most this share of a step's work: every batch has a program of its own, which must be compiled.
PADDING = 0.05
# Entries of the largest array of a chunk. A step multiplies the same blocks many times, and out of
# the cache that takes about a quarter less time than out of memory.
CACHE_ENTRIES = 1 << 18


class BlockSplit(NamedTuple):
    """A part of every layer of a leaf, the block size of each dimension, and which are dense.

    None leaves a dimension uncut.
    """

    part: Part
    lengths: tuple[int | None, ...]
    dense: tuple[bool, ...]


class BlockBatch(NamedTuple):
    """All blocks that are worked on together."""

    shape: tuple[int, ...]  # of a block, padded
    dense: tuple[bool, ...]  # whether the factor of a dimension is a matrix or its diagonal
    sizes: np.ndarray  # of each block without padding. [B, order]
    layers: np.ndarray  # the layer that each block is in; beyond the last for padding. [B]

    @property
    def rows(self) -> int:
        return len(self.layers)


class BlockGrid(NamedTuple):
    """A grid of equal blocks in every layer of a group of leaves, and where it is in its batch."""

    batch: str
    first: int  # its first row there
    part: Part
    grid: Grid
    swapped: bool  # whether blocks are transposed there


class LeafGroup(NamedTuple):
    """Leaves whose layers have one shape."""

    leaves: tuple[int, ...]
    layers: tuple[int, ...]  # of each leaf
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    grids: tuple[BlockGrid, ...]


class TreeLayout(NamedTuple):
    """Where every block of every leaf goes; leaves without a group are left to Adam."""

    groups: tuple[LeafGroup, ...]
    batches: dict[str, BlockBatch]
    layers: tuple[slice, ...]  # of each leaf, in one numbering of the layers of all leaves
    leads: tuple[tuple[int, ...], ...]  # the dimensions of each leaf that count its layers

    @property
    def layer_count(self) -> int:
        return self.layers[-1].stop if self.layers else 0


Kind = tuple[tuple[int, ...], tuple[bool, ...]]  # the shape of a block, and which sides are dense


def matrix_splits(
    shape: tuple[int, ...], settings: Settings, order: int | None = None
) -> list[BlockSplit]:
    """Cut matrices at `max_dim`; none for what is not a matrix. `order`: as in merge_dims."""
    vector = settings["vectors"] and math.prod(shape) > 1
    if not vector and not is_matrix(shape):
        return []
    longest = settings["max_dim"]
    parts = cut_parts(
        shape,
        max_dim=longest,
        order=order,
        split=settings["split"],
        split_dim=settings["split_dim"],
    )
    return [
        BlockSplit(part, (longest,) * len(part.merged), (True,) * len(part.merged))
        for part in parts
    ]


def tree_layout(
    tree: Any,
    settings: Settings,
    splits: Callable[[tuple[int, ...], Settings], list[BlockSplit]],
    padded: bool,
    multiple: int = 1,
) -> TreeLayout:
    """Lay out the blocks of a tree.

    Args:
        tree: of arrays, or of anything that has a shape and a dtype.
        settings: of the optimizer.
        splits: how the method cuts a layer of a given shape; nothing for leaves it does not step.
        padded: whether blocks may be transposed and padded to share a batch.
        multiple: batches are padded to a multiple of this number of blocks.
    """
    members, leads = _leaves_by_shape(tree, settings)
    ends = list(itertools.accumulate(map(math.prod, leads), initial=0))
    numbers = {
        shape: np.concatenate([np.arange(ends[i], ends[i + 1]) for i in leaves])
        for shape, leaves in members.items()
    }
    parts = {
        shape: _checked_splits(tree, i[0], shape, settings, splits) for shape, i in members.items()
    }
    grids = [
        (shape, split.part, grid, *_kind(grid, split, padded))
        for shape in members
        for split in parts[shape]
        for grid in cut_grids(split.part.merged, split.lengths)
    ]
    counts: dict[Kind, int] = {}
    for shape, _, grid, kind, _ in grids:
        counts[kind] = counts.get(kind, 0) + len(numbers[shape]) * math.prod(grid.counts)
    targets = _shared_shapes(counts) if padded else {kind: kind for kind in counts}

    sizes: dict[Kind, list[np.ndarray]] = {kind: [] for kind in targets.values()}
    layers: dict[Kind, list[np.ndarray]] = {kind: [] for kind in sizes}
    placed: dict[tuple[int, ...], list[BlockGrid]] = {shape: [] for shape in members}
    for shape, part, grid, kind, swapped in grids:
        batch = targets[kind]
        first = sum(map(len, layers[batch]))
        placed[shape].append(BlockGrid(batch_name(*batch), first, part, grid, swapped))
        layers[batch].append(np.repeat(numbers[shape], math.prod(grid.counts)))
        sizes[batch].append(np.tile(kind[0], (len(layers[batch][-1]), 1)))
    batches = {}
    for kind in sorted(sizes, key=lambda kind: batch_name(*kind)):
        spare = -sum(map(len, layers[kind])) % multiple
        batches[batch_name(*kind)] = BlockBatch(
            *kind,
            np.concatenate([*sizes[kind], np.tile(kind[0], (spare, 1))]),
            np.concatenate([*layers[kind], np.full(spare, ends[-1])]),
        )
    groups = [
        LeafGroup(
            tuple(leaves),
            tuple(math.prod(leads[i]) for i in leaves),
            shape,
            tuple(split.part for split in parts[shape]),
            tuple(placed[shape]),
        )
        for shape, leaves in members.items()
        if placed[shape]
    ]
    slices = tuple(slice(*pair) for pair in itertools.pairwise(ends))
    return TreeLayout(tuple(groups), batches, slices, tuple(leads))


def _leaves_by_shape(
    tree: Any, settings: Settings
) -> tuple[dict[tuple[int, ...], list[int]], list[tuple[int, ...]]]:
    """Numbers of the leaves by the shape of a layer, and the leading dimensions of each leaf."""
    members: dict[tuple[int, ...], list[int]] = {}
    leads = []
    stacked = values_by_path("stacked", tree, settings["stacked"])
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
        name, optimizer, lead = jax.tree_util.keystr(path), settings["optimizer"], stacked[number]
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{optimizer} needs real floating-point leaves, {name} is {leaf.dtype}; leave it "
                "out with optax.masked or optax.multi_transform"
            )
        # flags of leaves that stack layers on axis 0 are integers too
        if not isinstance(lead, int) or not 0 <= lead <= len(leaf.shape):
            raise ValueError(
                f"{optimizer}: stacked must be an integer from 0 to {len(leaf.shape)} for {name} "
                f"of shape {tuple(leaf.shape)}, got {lead!r}"
            )
        leads.append(tuple(leaf.shape[:lead]))
        if 0 not in leaf.shape:
            members.setdefault(tuple(leaf.shape[lead:]), []).append(number)
    return members, leads


def _checked_splits(
    tree: Any,
    number: int,
    shape: tuple[int, ...],
    settings: Settings,
    splits: Callable[[tuple[int, ...], Settings], list[BlockSplit]],
) -> list[BlockSplit]:
    try:
        return splits(shape, settings)
    except ValueError as error:
        name = jax.tree_util.keystr(jax.tree.leaves_with_path(tree)[number][0])
        raise ValueError(
            f"{settings['optimizer']}: leaf {name}: {error}, or give it a transformation of its "
            "own with optax.multi_transform"
        ) from None


def batch_name(shape: Sequence[int], dense: Sequence[bool]) -> str:
    """ "256x64"; a diagonal side has a d: "40000dx64", "768d"."""
    return "x".join(f"{n}{'' if full else 'd'}" for n, full in zip(shape, dense, strict=True))


def _kind(grid: Grid, split: BlockSplit, padded: bool) -> tuple[Kind, bool]:
    """The kind of a grid's blocks; where they may be padded, wide blocks are transposed."""
    if padded and len(grid.shape) == 2 and grid.shape[0] < grid.shape[1]:
        return (grid.shape[::-1], split.dense[::-1]), True
    return (grid.shape, split.dense), False


def _shared_shapes(rows: dict[Kind, int]) -> dict[Kind, Kind]:
    """The kind that each kind of block is padded to, by the cheapest paddings up to PADDING."""
    targets = {kind: kind for kind in rows}
    counts = dict(rows)
    budget = PADDING * sum(_work(kind) * count for kind, count in rows.items())
    while True:
        options = [
            (counts[small] * (_work(large) - _work(small)), small, large)
            for small, large in itertools.permutations(counts, 2)
            if small[1] == large[1] and all(a <= b for a, b in zip(small[0], large[0], strict=True))
        ]
        extra, small, large = min(options, default=(math.inf, None, None))
        if extra > budget or small is None or large is None:
            return targets
        budget -= extra
        counts[large] += counts.pop(small)
        targets = {kind: large if to == small else to for kind, to in targets.items()}


def _work(kind: Kind) -> int:
    """About how many multiplications a step of Quad does with a block."""
    shape, dense = kind
    entries = math.prod(shape)
    sides = [n for n, full in zip(shape, dense, strict=True) if full]
    return entries + sum(5 * n * entries + 2 * n**3 for n in sides)


def gather(leaves: Sequence[jax.Array], layout: TreeLayout, dtype: Any) -> Arrays:
    """All blocks of all leaves, batch by batch. [B, ...]"""
    blocks: dict[str, list[jax.Array]] = {name: [] for name in layout.batches}
    for group in layout.groups:
        members = zip(group.leaves, group.layers, strict=True)
        stack = _joined([leaves[i].reshape(n, *group.shape).astype(dtype) for i, n in members], 0)
        for grid in group.grids:
            blocks[grid.batch].append(_cut(stack, grid, layout.batches[grid.batch].shape))
    for name, batch in layout.batches.items():
        spare = batch.rows - sum(map(len, blocks[name]))
        if spare:
            blocks[name].append(jnp.zeros((spare, *batch.shape), dtype))
    return {name: _joined(arrays, 0) for name, arrays in blocks.items()}


def scatter(batches: Arrays, layout: TreeLayout) -> dict[int, jax.Array]:
    """The leaves put together again, by number, each as layers. [layers, ...]"""
    leaves = {}
    for group in layout.groups:
        parts = []
        for part in group.parts:
            regions = [
                _region(batches[grid.batch], grid, sum(group.layers))
                for grid in group.grids
                if grid.part is part
            ]
            whole = _assembled(regions, part.merged)
            parts.append(whole.reshape(-1, *part.shape))
        stack = _joined(parts, axis=max(1, len(group.parts[0].narrow)))
        ends = itertools.accumulate(group.layers, initial=0)
        for number, (start, end) in zip(group.leaves, itertools.pairwise(ends), strict=True):
            leaves[number] = stack[start:end]
    return leaves


def _cut(stack: jax.Array, place: BlockGrid, shape: tuple[int, ...]) -> jax.Array:
    """The blocks of a grid in all layers, padded. [layers, ...] → [B, *shape]"""
    grid = place.grid
    view = stack[(slice(None), *place.part.narrow)].reshape(len(stack), *place.part.merged)
    extents = map(math.prod, zip(grid.counts, grid.shape, strict=True))
    ends = [start + extent for start, extent in zip(grid.start, extents, strict=True)]
    region = view[(slice(None), *map(slice, grid.start, ends))]
    pairs = [size for pair in zip(grid.counts, grid.shape, strict=True) for size in pair]
    cells = region.reshape(len(stack), *pairs)
    counted = range(1, len(pairs), 2)
    cells = cells.transpose(0, *counted, *(axis + 1 for axis in counted))
    blocks = cells.reshape(-1, *grid.shape)
    blocks = blocks.swapaxes(1, 2) if place.swapped else blocks
    if blocks.shape[1:] == shape:
        return blocks
    spare = [(0, full - size) for full, size in zip(shape, blocks.shape[1:], strict=True)]
    return jnp.pad(blocks, [(0, 0), *spare])


def _region(batch: jax.Array, place: BlockGrid, layers: int) -> jax.Array:
    """The inverse of _cut: what the grid covers of every layer. [layers, ...]"""
    grid, order = place.grid, len(place.grid.shape)
    rows = slice(place.first, place.first + layers * math.prod(grid.counts))
    sizes = grid.shape[::-1] if place.swapped else grid.shape
    blocks = batch[(rows, *map(slice, sizes))]
    blocks = blocks.swapaxes(1, 2) if place.swapped else blocks
    cells = blocks.reshape(layers, *grid.counts, *grid.shape)
    cells = cells.transpose(0, *(axis for i in range(1, order + 1) for axis in (i, i + order)))
    return cells.reshape(layers, *map(math.prod, zip(grid.counts, grid.shape, strict=True)))


def _assembled(regions: list[jax.Array], merged: tuple[int, ...]) -> jax.Array:
    """Join regions in the order of cut_grids, the last dimension first. [layers, *merged]"""
    for axis in range(len(merged), 0, -1):
        joined, run = [], []
        for region in regions:
            run.append(region)
            if sum(piece.shape[axis] for piece in run) == merged[axis - 1]:
                joined.append(_joined(run, axis))
                run = []
        regions = joined
    return regions[0]


def _joined(arrays: list[jax.Array], axis: int) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=axis)


class LayerIndex:
    """Reductions over all blocks of a layer, whichever batches they are in."""

    def __init__(self, layout: TreeLayout) -> None:
        self.layout, self.names = layout, list(layout.batches)
        batches = layout.batches.values()
        self.ends = np.cumsum([batch.rows for batch in batches])
        self.of_row = np.array([i for batch in batches for i in batch.layers], dtype=np.int32)
        entries = np.zeros(layout.layer_count + 1)
        for batch in batches:
            np.add.at(entries, batch.layers, batch.sizes.prod(axis=1))
        self.entries = np.maximum(entries[:-1], 1)

    def largest(self, rows: Arrays) -> jax.Array:
        """The largest value of all blocks of a layer, at least 0. [layers]"""
        values = self._joined(rows)
        return jnp.zeros(self.layout.layer_count + 1, values.dtype).at[self.of_row].max(values)[:-1]

    def total(self, rows: Arrays) -> jax.Array:
        """The sum over all blocks of a layer. [layers]"""
        values = self._joined(rows)
        return jnp.zeros(self.layout.layer_count + 1, values.dtype).at[self.of_row].add(values)[:-1]

    def rows(self, values: jax.Array, padding: Any) -> Arrays:
        """The value of each block's layer; `padding` for blocks that only fill a batch."""
        padded = jnp.append(values, jnp.asarray(padding, values.dtype))[self.of_row]
        starts = [0, *self.ends]
        return {
            name: padded[start:end]
            for name, (start, end) in zip(self.names, itertools.pairwise(starts), strict=True)
        }

    def norms(self, batches: Arrays, replicate: Callable[[Any], Any]) -> jax.Array:
        """‖x‖ of every layer. `replicate`: see sharding.Placement. [layers]"""
        lengths = replicate({name: norms(blocks) for name, blocks in batches.items()})
        tops = nonzero(self.largest({name: peak for name, (peak, _) in lengths.items()}))
        top_of_row = self.rows(tops, 1)
        energies = {
            name: jnp.square(norm * peak / top_of_row[name])
            for name, (peak, norm) in lengths.items()
        }
        return tops * jnp.sqrt(self.total(energies))

    def scaled(self, batches: Arrays, scales: jax.Array, spread: Callable[[Any], Any]) -> Arrays:
        """Every layer times its number, [layers]. `spread`: see sharding.Placement."""
        of_rows = spread(self.rows(scales, 0))
        return {name: blocks * across(of_rows[name], blocks) for name, blocks in batches.items()}

    def _joined(self, rows: Arrays) -> jax.Array:
        values = [rows[name] for name in self.names]
        return jnp.concatenate(values) if values else jnp.zeros(0, jnp.int32)


def chunk_rows(rows: int, entries: int) -> int:
    """How many of the blocks, of so many entries each, to work on at a time.

    All of them on a GPU or TPU, which a loop would leave idle.
    """
    fit = max(1, CACHE_ENTRIES // max(1, entries))
    if fit >= rows or jax.default_backend() != "cpu":
        return rows
    # every chunk costs about half a block more than its blocks, and the last one may overlap others
    return min(range(fit, 0, -1), key=lambda size: -(-rows // size) * (size + 0.5))
