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
PADDING = 0.01
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
        padded: whether blocks may be padded to share a batch.
        multiple: batches are padded to a multiple of this number of blocks.
    """
    stacked = values_by_path("stacked", tree, settings["stacked"])
    members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    names: dict[tuple[int, ...], str] = {}
    leads = []
    leaves = jax.tree.leaves_with_path(tree)
    for number, ((path, array), lead) in enumerate(zip(leaves, stacked, strict=True)):
        name = jax.tree_util.keystr(path)
        lead = _checked_lead(name, array, lead, settings["optimizer"])
        shape = tuple(array.shape[lead:])
        leads.append(tuple(array.shape[:lead]))
        if 0 not in array.shape:
            members.setdefault(shape, []).append((number, math.prod(leads[-1])))
            names.setdefault(shape, name)
    ends = list(itertools.accumulate(map(math.prod, leads), initial=0))
    layers = tuple(slice(*pair) for pair in itertools.pairwise(ends))

    cuts = {}  # by the shape of a layer
    rows: dict[Kind, int] = {}
    for shape, group in members.items():
        try:
            cuts[shape] = splits(shape, settings)
        except ValueError as error:
            raise ValueError(
                f"{settings['optimizer']}: leaf {names[shape]}: {error}, or give it a "
                "transformation of its own with optax.multi_transform"
            ) from None
        for split in cuts[shape]:
            for grid in cut_grids(split.part.merged, split.lengths):
                kind = grid.shape, split.dense
                count = math.prod(grid.counts) * sum(layers for _, layers in group)
                rows[kind] = rows.get(kind, 0) + count
    targets = _shared_shapes(rows) if padded else {kind: kind for kind in rows}
    kinds = {batch_name(*kind): kind for kind in targets.values()}
    sizes: dict[str, list[np.ndarray]] = {name: [] for name in sorted(kinds)}
    row_layers: dict[str, list[np.ndarray]] = {name: [] for name in sizes}
    groups = []
    for shape, group in members.items():
        group_layers = np.concatenate([np.arange(ends[i], ends[i + 1]) for i, _ in group])
        grids = []
        for split in cuts[shape]:
            for grid in cut_grids(split.part.merged, split.lengths):
                kind = grid.shape, split.dense
                name = batch_name(*targets[kind])
                first = sum(map(len, row_layers[name]))
                row_layers[name].append(np.repeat(group_layers, math.prod(grid.counts)))
                sizes[name].append(np.tile(kind[0], (len(row_layers[name][-1]), 1)))
                grids.append(BlockGrid(name, first, split.part, grid))
        if grids:
            numbers, counts = zip(*group, strict=True)
            parts = tuple(split.part for split in cuts[shape])
            groups.append(LeafGroup(numbers, counts, shape, parts, tuple(grids)))
    batches = {}
    for name in sizes:
        spare = -sum(map(len, row_layers[name])) % multiple
        batches[name] = BlockBatch(
            *kinds[name],
            np.concatenate([*sizes[name], np.tile(kinds[name][0], (spare, 1))]),
            np.concatenate([*row_layers[name], np.full(spare, ends[-1])]),
        )
    return TreeLayout(tuple(groups), batches, layers, tuple(leads))


def batch_name(shape: Sequence[int], dense: Sequence[bool]) -> str:
    """ "256x64"; a diagonal side has a d: "40000dx64", "768d"."""
    return "x".join(f"{n}{'' if full else 'd'}" for n, full in zip(shape, dense, strict=True))


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
    if blocks.shape[1:] == shape:
        return blocks
    spare = [(0, full - size) for full, size in zip(shape, blocks.shape[1:], strict=True)]
    return jnp.pad(blocks, [(0, 0), *spare])


def _region(batch: jax.Array, place: BlockGrid, layers: int) -> jax.Array:
    """The inverse of _cut: what the grid covers of every layer. [layers, ...]"""
    grid, order = place.grid, len(place.grid.shape)
    rows = slice(place.first, place.first + layers * math.prod(grid.counts))
    blocks = batch[(rows, *map(slice, grid.shape))]
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


def _checked_lead(name: str, leaf: Any, stacked: Any, optimizer: str) -> int:
    """How many dimensions of a leaf count layers; True and False, which are flags, are 1 and 0."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"{optimizer} needs real floating-point leaves, {name} is {leaf.dtype}; leave it out "
            "with optax.masked or optax.multi_transform"
        )
    if not isinstance(stacked, (bool, int)) or not 0 <= stacked <= len(leaf.shape):
        raise ValueError(
            f"{optimizer}: stacked must be an integer from 0 to {len(leaf.shape)} for {name} of "
            f"shape {tuple(leaf.shape)}, got {stacked!r}"
        )
    return int(stacked)


class LayerIndex:
    """Reductions over all blocks of a layer, whichever batches they are in."""

    def __init__(self, layout: TreeLayout) -> None:
        self.count = layout.layer_count
        self.names = list(layout.batches)
        batches = layout.batches.values()
        self.ends = np.cumsum([batch.rows for batch in batches])
        self.of_row = np.concatenate([batch.layers for batch in batches])
        sizes = np.concatenate([batch.sizes.prod(axis=1) for batch in batches])
        self.entries = np.maximum(np.bincount(self.of_row, sizes, self.count + 1)[:-1], 1)

    def largest(self, rows: Arrays) -> jax.Array:
        """The largest value of all blocks of a layer, at least 0. [layers]"""
        values = self._joined(rows)
        return jnp.zeros(self.count + 1, values.dtype).at[self.of_row].max(values)[:-1]

    def total(self, rows: Arrays) -> jax.Array:
        """The sum over all blocks of a layer. [layers]"""
        values = self._joined(rows)
        return jnp.zeros(self.count + 1, values.dtype).at[self.of_row].add(values)[:-1]

    def rows(self, values: jax.Array, padding: Any) -> Arrays:
        """The value of each block's layer; `padding` for blocks that only fill a batch."""
        padded = jnp.append(values, jnp.asarray(padding, values.dtype))[self.of_row]
        return dict(zip(self.names, jnp.split(padded, self.ends[:-1]), strict=True))

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
        return jnp.concatenate([rows[name] for name in self.names])


def chunk_rows(rows: int, entries: int) -> int:
    """How many of the blocks, of so many entries each, to work on at a time.

    A divisor that about fills the cache, if there is one. All blocks on a GPU or TPU, which a loop
    would leave idle.
    """
    fit = max(1, CACHE_ENTRIES // max(1, entries))
    if fit >= rows or jax.default_backend() != "cpu":
        return rows
    return next((size for size in range(fit, max(1, fit // 4), -1) if rows % size == 0), fit)


def in_chunks(function: Callable[[Any, Any], tuple[Any, Any]], inputs: Any, state: Any) -> Any:
    """function(inputs, state) → outputs, state; as many blocks at a time as the cache holds.

    All arrays have blocks first. The state is updated in place.
    """
    rows = len(jax.tree.leaves(inputs)[0])
    entries = max(math.prod(array.shape[1:]) for array in jax.tree.leaves((inputs, state)))
    size = chunk_rows(rows, entries)
    if size == rows:
        return function(inputs, state)

    def work(start: Any, size: int, carry: Any) -> Any:
        def sliced(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        results = function(jax.tree.map(sliced, inputs), jax.tree.map(sliced, carry[1]))
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0),
            carry,
            results,
        )

    shapes, _ = jax.eval_shape(function, inputs, state)
    outputs = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), shapes)
    chunks, remainder = divmod(rows, size)
    carry = jax.lax.fori_loop(
        0, chunks, lambda i, carry: work(i * size, size, carry), (outputs, state)
    )
    return work(chunks * size, remainder, carry) if remainder else carry
