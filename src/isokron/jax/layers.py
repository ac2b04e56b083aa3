"""What is true of a whole layer, and of each of its blocks: finiteness, bias, norm, clip."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isokron.jax.placement import Placement
from isokron.jax.whitening import Batches
from isokron.white_kron import CLIP, Plan


class Layers:
    """The layers of all leaves, numbered, and the one that each row of each batch belongs to.

    A leaf that is not scanned is one layer. Rows that only pad a batch belong to one beyond.
    """

    def __init__(self, plan: Plan, rows: dict[str, int]) -> None:
        firsts = np.cumsum([0] + [leaf.layers for leaf in plan.leaves])
        self.count = int(firsts[-1])
        self.of_leaf = [slice(a, b) for a, b in itertools.pairwise(firsts)]
        sizes = [np.full(leaf.layers, max(1, np.prod(leaf.shape))) for leaf in plan.leaves]
        self.sizes = np.concatenate(sizes).astype(np.float32)
        self.ends = np.cumsum(list(rows.values()))
        self.names = list(rows)
        of_row = []
        for name in rows:
            index = np.full(rows[name], self.count)
            for piece in plan.buckets[name].pieces:
                own = firsts[piece.leaf] + np.arange(piece.layers)
                index[piece.first : piece.first + piece.blocks] = np.repeat(
                    own, piece.blocks // piece.layers
                )
            of_row.append(index)
        self.of_row = np.concatenate(of_row)

    def most(self, rows: Batches) -> jax.Array:
        """The largest of all rows of a layer, at least 0: [layers]"""
        values = self._joined(rows)
        return jnp.zeros(self.count + 1, values.dtype).at[self.of_row].max(values)[:-1]

    def total(self, rows: Batches) -> jax.Array:
        """The sum of all rows of a layer: [layers]"""
        values = self._joined(rows)
        return jnp.zeros(self.count + 1, values.dtype).at[self.of_row].add(values)[:-1]

    def rows(self, values: jax.Array, padding: Any) -> Batches:
        """Each row's layer's value."""
        padded = jnp.append(values, jnp.asarray(padding, values.dtype))
        return self._parted(padded[self.of_row])

    def _joined(self, rows: Batches) -> jax.Array:
        return jnp.concatenate([rows[name] for name in self.names])

    def _parted(self, values: jax.Array) -> Batches:
        return dict(zip(self.names, jnp.split(values, self.ends[:-1]), strict=True))


def known(
    batches: Batches, layers: Layers, place: Placement, seen: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, Batches, Batches]:
    """Which layers are finite, [layers]; which blocks are, [b]; and these divided by their bias.

    `seen`: finite ↦ the bias 1 − b₁ᵗ of each layer, [layers]. Blocks that are not finite are 0.
    """
    sizes = place.whole({name: _largest(blocks) for name, blocks in batches.items()})
    broken = {name: (~jnp.isfinite(size)).astype(jnp.int32) for name, size in sizes.items()}
    finite = layers.total(broken) == 0
    live = place.spread(layers.rows(finite, False))
    bias = place.spread(layers.rows(seen(finite), 1))
    corrected = {
        name: jnp.where(_across(live[name], blocks), blocks / _across(bias[name], blocks), 0)
        for name, blocks in batches.items()
    }
    return finite, live, corrected


def clipped(batches: Batches, layers: Layers, place: Placement, divisor: float) -> Batches:
    """Every layer scaled to a root mean square of 1.1 at most, and divided."""
    rms = _norms(batches, layers, place) / jnp.sqrt(layers.sizes)
    scales = place.spread(layers.rows(CLIP / jnp.maximum(rms, CLIP) / divisor, 0))
    return {name: blocks * _across(scales[name], blocks) for name, blocks in batches.items()}


def normalized(batches: Batches, layers: Layers, place: Placement) -> Batches:
    """g/(‖g‖ + 10⁻⁶), every layer by itself."""
    norms = place.spread(layers.rows(_norms(batches, layers, place) + 1e-6, 1))
    return {name: blocks / _across(norms[name], blocks) for name, blocks in batches.items()}


def _norms(batches: Batches, layers: Layers, place: Placement) -> jax.Array:
    """‖x‖ of every layer. [layers]"""
    sizes = {name: _largest(blocks) for name, blocks in batches.items()}
    # relative to the largest entry, because the squares of large entries overflow
    energies = {
        name: jnp.sum(
            jnp.square(blocks / _across(_not_zero(sizes[name]), blocks)),
            axis=tuple(range(1, blocks.ndim)),
        )
        for name, blocks in batches.items()
    }
    sizes, energies = place.whole((sizes, energies))
    tops = _not_zero(layers.most(sizes))
    top_of_row = layers.rows(tops, 1)
    energies = {
        name: each * jnp.square(sizes[name] / top_of_row[name]) for name, each in energies.items()
    }
    return tops * jnp.sqrt(layers.total(energies))


def _largest(blocks: jax.Array) -> jax.Array:
    """max|x| of each block; not finite where the block is not. [b]"""
    return jnp.max(jnp.abs(blocks), axis=tuple(range(1, blocks.ndim)))


def _across(values: jax.Array, blocks: jax.Array) -> jax.Array:
    """One value a block, shaped to broadcast over it."""
    return jnp.expand_dims(values, tuple(range(1, blocks.ndim)))


def _not_zero(values: jax.Array) -> jax.Array:
    return jnp.where(values == 0, 1, values)
