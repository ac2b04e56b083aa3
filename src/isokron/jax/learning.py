"""Factors learned from whitened blocks: all sides of one size at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isokron.jax.factors import Gram, Method
from isokron.jax.norm_bound import norm_bound
from isokron.jax.whitening import Batches, Factors, Side, scaled
from isokron.white_kron import SQUARE_LIMIT

Probes = Callable[[int], jax.Array]


class Seen(NamedTuple):
    """What one side of a batch shows: whitened blocks with this side first, [b, n, k]."""

    name: str
    axis: int
    side: Side
    white: jax.Array
    largest: jax.Array  # max|white| of each block

    @property
    def target(self) -> jax.Array:
        """t₂: what T is on average where P has whitened."""
        return jnp.full_like(self.side.lipschitz, self.white.shape[2])

    def group(self, together: bool) -> tuple[object, ...]:
        """Sides of a group are worked on as one batch. Thin blocks have W in place of T."""
        *_, n, k = self.white.shape
        dense = self.side.factor.ndim == 3
        kind = (n, dense, k if dense and 2 * k < n else 0)
        return kind if together else (*kind, self.name, self.axis)


def learn(
    whites: Batches,
    factors: Factors,
    method: Method,
    rate: jax.Array,
    probes: Probes,
    limits: dict[str, Any],
    together: bool,
) -> tuple[Factors, Batches]:
    """Factors after one step on the blocks PG, and which of them showed anything at all: [b].

    T = WWᵀ with W = PG, t₂ = n on the left; W = (PG)ᵀ, t₂ = m on the right.
    `together`: whether sides of different batches are stacked, which makes fewer and larger
    operations; blocks that are spread over devices had better stay where they are.
    """
    shown, seen = {}, []
    for name, white in whites.items():
        largest = jnp.max(jnp.abs(white), axis=tuple(range(1, white.ndim)))
        shown[name] = largest > 0
        # so that the squares of whatever is finite are
        white = scaled(white, SQUARE_LIMIT / jnp.maximum(largest, SQUARE_LIMIT))
        largest = jnp.minimum(largest, SQUARE_LIMIT)
        white = white if white.ndim == 3 else white[:, :, None]
        for axis, side in enumerate(factors[name]):
            turned = white if axis == 0 else white.swapaxes(1, 2)
            seen.append(Seen(name, axis, side, turned, largest))
    groups: dict[tuple[object, ...], list[Seen]] = {}
    for each in seen:
        groups.setdefault(each.group(together), []).append(each)

    moved: dict[tuple[str, int], Side] = {}
    for group in groups.values():
        side = _step(group, method, rate, probes)
        start = 0
        for each in group:
            end = start + each.white.shape[0]
            limit = limits[each.name]
            factor = jnp.clip(side.factor[start:end], -limit, limit)
            moved[each.name, each.axis] = Side(factor, side.lipschitz[start:end])
            start = end
    return {
        name: tuple(moved[name, axis] for axis in range(len(sides)))
        for name, sides in factors.items()
    }, shown


def _step(group: list[Seen], method: Method, rate: jax.Array, probes: Probes) -> Side:
    """ℓ = ‖T‖₂ + t₂, L ← max(0.95L + 0.05ℓ, ℓ), then the method's step of length plr/L."""
    factor = _stack([each.side.factor for each in group])
    lipschitz = _stack([each.side.lipschitz for each in group])
    target = _stack([each.target for each in group])
    if factor.ndim == 2:
        diagonal = _stack([jnp.sum(jnp.square(each.white), axis=2) for each in group])
        lipschitz = _lipschitz(lipschitz, jnp.max(diagonal, axis=1) + target)
        return Side(method.diagonal(factor, diagonal, target, rate / lipschitz), lipschitz)
    n, k = group[0].white.shape[1:]
    if 2 * k < n:
        root = _stack([each.white for each in group])
        gram = Gram(_outer(root), root)
    else:
        gram = Gram(_stack([_outer(each.white) for each in group]), None)
    scale = jnp.square(_stack([each.largest for each in group]))
    steepness = norm_bound(gram.matrix, scale, probes(n)) + target
    lipschitz = _lipschitz(lipschitz, steepness)
    return Side(method.dense(factor, gram, target, rate / lipschitz, probes(n)), lipschitz)


def _lipschitz(old: jax.Array, steepness: jax.Array) -> jax.Array:
    return jnp.maximum(0.95 * old + 0.05 * steepness, steepness)


def _outer(root: jax.Array) -> jax.Array:
    return jnp.einsum("bik,bjk->bij", root, root)


def _stack(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
