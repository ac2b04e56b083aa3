"""Leaves of any shape to batches of equal blocks and back, and reductions over layers.

A leaf is a stack of layers, each cut into blocks by isokron.block_layout. Leaves of one shape are
stacked and cut together, and all blocks of one shape are one batch, so that the compiled program
grows with the number of shapes and not with the number of leaves.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isokron.block_layout import Grid, Part, cut_grids, cut_lengths, cut_parts, is_matrix
from isokron.jax.linalg import across, nonzero, norms
from isokron.jax.settings import is_sizes, values_by_path
from isokron.jax.sharding import Placement

Arrays = dict[str, jax.Array]  # by the name of a batch
Settings = Mapping[str, Any]
# A part of a layer and the block size of each dimension; None: uncut, with a diagonal factor.
Split = tuple[Part, tuple[int | None, ...]]

# Blocks are padded with zeros to the shape of a larger batch while all padding together costs at
# most this share of a step's work: every batch has a program of its own, which must be compiled.
PADDING = 0.05
# Entries of the largest array of a chunk. A step multiplies the same blocks many times, and out of
# the cache that takes about a quarter less time than out of memory.
CACHE_ENTRIES = 1 << 18


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
    """A grid of equal blocks in every layer of a group of leaves."""

    batch: str  # that it is in
    part: Part
    grid: Grid
    swapped: bool  # whether blocks are transposed there


class LeafGroup(NamedTuple):
    """Leaves whose layers have one shape and `split`, by number, and the blocks of a layer."""

    leaves: list[int]
    shape: tuple[int, ...]
    grids: list[BlockGrid]


@dataclass(frozen=True)
class TreeLayout:
    """Where every block of every leaf goes, and reductions over all blocks of a layer.

    The layers of all leaves are numbered in the order of the leaves.
    """

    groups: list[LeafGroup]  # leaves without a group are left to Adam
    batches: dict[str, BlockBatch]
    layers: list[slice]  # of each leaf
    leads: list[tuple[int, ...]]  # the dimensions of each leaf that count its layers
    place: Placement

    @property
    def layer_count(self) -> int:
        return self.layers[-1].stop if self.layers else 0

    @property
    def stepped(self) -> set[int]:
        """The leaves that the method steps."""
        return {number for group in self.groups for number in group.leaves}

    @cached_property
    def layer_of_row(self) -> np.ndarray:
        """The layer of each block of all batches. [rows]"""
        layers = [batch.layers for batch in self.batches.values()]
        return np.concatenate([np.zeros(0, np.int32), *layers], dtype=np.int32)

    @cached_property
    def entries(self) -> np.ndarray:
        """The entries of each layer that are in blocks, at least 1. [layers]"""
        sizes = [batch.sizes.prod(axis=1) for batch in self.batches.values()]
        entries = np.concatenate([np.zeros(0), *sizes])
        counts = np.bincount(self.layer_of_row, entries, minlength=self.layer_count + 1)
        return np.maximum(counts[:-1], 1)

    def reduced(self, rows: Arrays, operation: str) -> jax.Array:
        """The sum ("add"), or the largest value and at least 0 ("max"), over a layer. [layers]"""
        columns = [rows[name] for name in self.batches] or [jnp.zeros(0, jnp.int32)]
        values = jnp.concatenate(columns)
        # blocks that only fill a batch reduce into one more layer
        zeros = jnp.zeros(self.layer_count + 1, values.dtype)
        return getattr(zeros.at[self.layer_of_row], operation)(values)[:-1]

    def rows(self, values: jax.Array, padding: Any) -> Arrays:
        """The value of each block's layer; `padding` for blocks that only fill a batch."""
        padded = jnp.append(values, jnp.asarray(padding, values.dtype))[self.layer_of_row]
        ends = itertools.accumulate((batch.rows for batch in self.batches.values()), initial=0)
        pairs = zip(self.batches, itertools.pairwise(ends), strict=True)
        return {name: padded[start:end] for name, (start, end) in pairs}

    def norms(self, batches: Arrays) -> jax.Array:
        """‖x‖ of every layer, whose squares may be too large or too small to add. [layers]"""
        lengths = self.place.replicate({name: norms(blocks) for name, blocks in batches.items()})
        peaks = {name: peak for name, (peak, _) in lengths.items()}
        tops = nonzero(self.reduced(peaks, "max"))
        top_of_row = self.rows(tops, 1)
        energies = {
            name: jnp.square(norm * peak / top_of_row[name])
            for name, (peak, norm) in lengths.items()
        }
        return tops * jnp.sqrt(self.reduced(energies, "add"))

    def scaled(self, batches: Arrays, scales: jax.Array) -> Arrays:
        """Every layer times its number, [layers]."""
        of_rows = self.place.spread(self.rows(scales, 0))
        return {name: blocks * across(of_rows[name], blocks) for name, blocks in batches.items()}


Form = tuple[tuple[int, ...], Any]  # the shape of a layer, and `split` of it
Kind = tuple[tuple[int, ...], tuple[bool, ...]]  # the shape of a block, and which sides are dense
Splitter = Callable[[tuple[int, ...], Settings], list[Split]]


def matrix_splits(shape: tuple[int, ...], settings: Settings) -> list[Split]:
    """Merge dimensions to `order`, and cut at `max_dim`; none for what is not a matrix."""
    if not is_matrix(shape) and not (settings["vectors"] and math.prod(shape) > 1):
        return []
    max_dim, order = settings["max_dim"], settings["order"]
    split, dim = settings["split"], settings["split_dim"]
    parts = cut_parts(shape, max_dim=max_dim, order=order, split=split, split_dim=dim)
    return [(part, cut_lengths(part.merged, max_dim)) for part in parts]


def tree_layout(
    tree: Any, settings: Settings, splits: Splitter, padded: bool, place: Placement
) -> TreeLayout:
    """Lay out the blocks of a tree.

    Args:
        tree: of arrays, or of anything that has a shape and a dtype.
        settings: of the optimizer.
        splits: how the method cuts a layer of a given shape; nothing for leaves it does not step.
        padded: whether blocks may be transposed and padded to share a batch.
        place: where blocks lie; batches are padded to a multiple of its size.
    """
    members, parts, leads = _leaves_by_form(tree, settings, splits)
    ends = list(itertools.accumulate(map(math.prod, leads), initial=0))
    layers = [slice(*pair) for pair in itertools.pairwise(ends)]
    numbers = {form: np.r_[*(layers[i] for i in leaves)] for form, leaves in members.items()}
    grids = [
        (form, part, grid, *_kind(grid, lengths, padded))
        for form in members
        for part, lengths in parts[form]
        for grid in cut_grids(part.merged, lengths)
    ]
    counts: dict[Kind, int] = {}
    for form, _, grid, kind, _ in grids:
        counts[kind] = counts.get(kind, 0) + len(numbers[form]) * math.prod(grid.counts)
    targets = _shared_shapes(counts) if padded else {kind: kind for kind in counts}

    rows: dict[Kind, list[tuple[np.ndarray, np.ndarray]]] = {kind: [] for kind in targets.values()}
    placed: dict[Form, list[BlockGrid]] = {form: [] for form in members}
    for form, part, grid, kind, swapped in grids:
        target = targets[kind]
        placed[form].append(BlockGrid(batch_name(*target), part, grid, swapped))
        layer = np.repeat(numbers[form], math.prod(grid.counts))
        rows[target].append((np.tile(kind[0], (len(layer), 1)), layer))
    batches = {}
    for kind in sorted(rows, key=lambda kind: batch_name(*kind)):
        spare = -sum(len(layer) for _, layer in rows[kind]) % place.size
        rows[kind].append((np.tile(kind[0], (spare, 1)), np.full(spare, ends[-1])))
        columns = map(np.concatenate, zip(*rows[kind], strict=True))
        batches[batch_name(*kind)] = BlockBatch(*kind, *columns)
    groups = [LeafGroup(members[form], form[0], placed[form]) for form in members if placed[form]]
    return TreeLayout(groups, batches, layers, leads, place)


def _leaves_by_form(
    tree: Any, settings: Settings, splits: Splitter
) -> tuple[dict[Form, list[int]], dict[Form, list[Split]], list[Any]]:
    """The leaves and the parts by the form of a layer, and the leading dimensions of each leaf."""
    members: dict[Form, list[int]] = {}
    parts: dict[Form, list[Split]] = {}
    leads = []
    stacked = values_by_path("stacked", tree, settings["stacked"])
    split = values_by_path("split", tree, settings["split"], is_sizes)
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
        name, optimizer = jax.tree_util.keystr(path), settings["optimizer"]
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{optimizer} needs real floating-point leaves, {name} is {leaf.dtype}; leave it "
                "out with optax.masked or optax.multi_transform"
            )
        # flags of leaves that stack layers on axis 0 are integers too; None: no leaf does
        lead = 0 if stacked[number] is None else stacked[number]
        if not isinstance(lead, int) or not 0 <= lead <= len(leaf.shape):
            raise ValueError(
                f"{optimizer}: stacked must be an integer from 0 to {len(leaf.shape)} for {name} "
                f"of shape {tuple(leaf.shape)}, got {lead!r}"
            )
        leads.append(tuple(leaf.shape[:lead]))
        shape = tuple(leaf.shape[lead:])
        if 0 in leaf.shape:
            continue
        sizes = split[number]
        if not (sizes is None or is_sizes(sizes)):
            raise ValueError(
                f"{optimizer}: split must be None, a number of equal parts or their sizes for "
                f"{name} of shape {tuple(leaf.shape)}, got {sizes!r}"
            )
        form: Form = (shape, tuple(sizes) if isinstance(sizes, list) else sizes)
        try:
            parts[form] = parts.get(form) or splits(shape, {**settings, "split": form[1]})
        except ValueError as error:
            raise ValueError(
                f"{optimizer}: leaf {name}: {error}; split also takes a tree, with None for leaves "
                "that are not split"
            ) from None
        members.setdefault(form, []).append(number)
    return members, parts, leads


def batch_name(shape: Sequence[int], dense: Sequence[bool]) -> str:
    """ "256x64"; a diagonal side has a d: "40000dx64", "768d"."""
    return "x".join(f"{n}{'' if full else 'd'}" for n, full in zip(shape, dense, strict=True))


def _kind(grid: Grid, lengths: Sequence[int | None], padded: bool) -> tuple[Kind, bool]:
    """The kind of a grid's blocks; where they may be padded, wide blocks are transposed."""
    dense = tuple(length is not None for length in lengths)
    if padded and len(grid.shape) == 2 and grid.shape[0] < grid.shape[1]:
        return (grid.shape[::-1], dense[::-1]), True
    return (grid.shape, dense), False


def _shared_shapes(rows: dict[Kind, int]) -> dict[Kind, Kind]:
    """The kind that each kind of block is padded to, by the cheapest paddings up to PADDING."""
    targets = {kind: kind for kind in rows}
    counts = dict(rows)
    budget = PADDING * sum(_work(kind) * count for kind, count in rows.items())
    while options := [
        (counts[small] * (_work(large) - _work(small)), small, large)
        for small, large in itertools.permutations(counts, 2)
        if small[1] == large[1] and all(a <= b for a, b in zip(small[0], large[0], strict=True))
    ]:
        extra, small, large = min(options)
        if extra > budget:
            break
        budget -= extra
        counts[large] += counts.pop(small)
        targets = {kind: large if to == small else to for kind, to in targets.items()}
    return targets


def _work(kind: Kind) -> int:
    """About how many multiplications a step of Quad does with a block."""
    shape, dense = kind
    entries = math.prod(shape)
    sides = [n for n, full in zip(shape, dense, strict=True) if full]
    return entries + sum(5 * n * entries + 2 * n**3 for n in sides)


def gather(leaves: Sequence[jax.Array], layout: TreeLayout, dtype: Any) -> Arrays:
    """All blocks of all leaves, batch by batch. [B, ...]

    This only moves entries and adds zeros, so its transpose puts the leaves together again.
    """
    blocks: dict[str, list[jax.Array]] = {name: [] for name in layout.batches}
    for group in layout.groups:
        layers = [leaves[i].reshape(-1, *group.shape).astype(dtype) for i in group.leaves]
        stack = jnp.concatenate(layers)
        for part, members in itertools.groupby(group.grids, key=lambda grid: grid.part):
            grids = list(members)
            regions = [stack[(slice(None), *part.narrow)].reshape(len(stack), *part.merged)]
            for axis in range(len(part.merged)):
                starts = sorted({grid.grid.start[axis] for grid in grids} - {0})
                # not by slices, whose transposes would be padded and added up
                regions = [x for region in regions for x in jnp.split(region, starts, axis + 1)]
            for grid, region in zip(grids, regions, strict=True):
                blocks[grid.batch].append(_cut(region, grid, layout.batches[grid.batch].shape))
    for name, batch in layout.batches.items():
        spare = batch.rows - sum(map(len, blocks[name]))
        blocks[name].append(jnp.zeros((spare, *batch.shape), dtype))
    return {name: jnp.concatenate(arrays) for name, arrays in blocks.items()}


def _cut(region: jax.Array, place: BlockGrid, shape: tuple[int, ...]) -> jax.Array:
    """The blocks of what a grid covers of all layers, padded. [layers, ...] → [B, *shape]"""
    grid, order = place.grid, len(place.grid.shape)
    pairs = [n for pair in zip(grid.counts, grid.shape, strict=True) for n in pair]
    cells = region.reshape(len(region), *pairs)
    cells = cells.transpose(0, *range(1, 2 * order, 2), *range(2, 2 * order + 1, 2))
    blocks = cells.reshape(-1, *grid.shape)
    blocks = blocks.swapaxes(1, 2) if place.swapped else blocks
    if blocks.shape[1:] == shape:
        return blocks
    spare = [(0, full - size) for full, size in zip(shape, blocks.shape[1:], strict=True)]
    return jnp.pad(blocks, [(0, 0), *spare])


def chunk_rows(rows: int, entries: int) -> int:
    """How many of the blocks, of so many entries each, to work on at a time."""
    fit = max(1, CACHE_ENTRIES // max(1, entries))
    # all of them on a GPU or TPU, which a loop would leave idle
    if fit >= rows or jax.default_backend() != "cpu":
        return rows
    # every chunk costs about half a block more than its blocks, and the last one may overlap others
    return min(range(fit, 0, -1), key=lambda size: -(-rows // size) * (size + 0.5))
