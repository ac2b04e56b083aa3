"""One step of all blocks: factors balanced and learned when that is due, and the direction."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isokron.jax.factors import Method, balance
from isokron.jax.moments import root_mean_square
from isokron.jax.noise import noise
from isokron.jax.whitening import Probes, Side, Sides, learn, whiten
from isokron.white_kron import BALANCE_EVERY, GROWTH_LIMIT

Factors = dict[str, Sides]
Batches = dict[str, jax.Array]


class Learning(NamedTuple):
    """How the factors learn. `every`: steps between their updates, after the first `warmup`.

    `apply`: the direction is that of the "new" factors, or of the "old" ones, whose PG is at hand.
    """

    method: Method
    every: Any
    warmup: Any
    apply: str
    noise_scale: Any
    damping: Any

    def due(self, count: jax.Array) -> jax.Array | bool:
        if isinstance(self.every, int) and self.every == 1:
            return True
        return (count <= self.warmup) | ((count - self.warmup) % self.every == 0)

    def balances(self, count: jax.Array) -> jax.Array:
        """At every hundredth step, or the first update after it."""
        last = count - jnp.where(count <= self.warmup, 1, self.every)
        return count // BALANCE_EVERY != jnp.maximum(last, 0) // BALANCE_EVERY


def step(
    learning: Learning,
    batches: Batches,
    factors: Factors,
    live: Batches,
    count: jax.Array,
    rate: jax.Array,
    probes: Probes,
    key: jax.Array | None,
) -> tuple[Batches, Factors]:
    """Directions, and the factors after this step; blocks that are not `live` keep theirs."""
    method = learning.method

    def keep() -> tuple[Batches, Factors]:
        return {
            name: whiten(blocks, _cast(factors[name], blocks.dtype), method)
            for name, blocks in batches.items()
        }, factors

    def move() -> tuple[Batches, Factors]:
        scales = _scales(factors, learning.balances(count))
        directions, moved = {}, {}
        for name, blocks in batches.items():
            sides = _cast(factors[name], blocks.dtype)
            white = whiten(_noisy(blocks, learning, key), sides, method)
            limit = _limit(learning, len(sides))
            learned, shown = learn(white, sides, method, rate, probes, limit)
            sides = tuple(
                _chosen(live[name] & shown, new, old, scale)
                for new, old, scale in zip(learned, sides, scales[name], strict=True)
            )
            directions[name] = white if learning.apply == "old" else whiten(blocks, sides, method)
            moved[name] = tuple(
                Side(side.factor.astype(old.factor.dtype), side.lipschitz)
                for side, old in zip(sides, factors[name], strict=True)
            )
        return directions, moved

    due = learning.due(count)
    return move() if due is True else jax.lax.cond(due, move, keep)


def _cast(sides: Sides, dtype: Any) -> Sides:
    return tuple(Side(side.factor.astype(dtype), side.lipschitz) for side in sides)


def _chosen(live: jax.Array, new: Side, old: Side, scale: jax.Array) -> Side:
    """What was learned, balanced; but where a block is not live, what it had."""
    across = tuple(range(1, new.factor.ndim))
    # P does not see the balance, so it may as well come after the step as before
    scaled = new.factor * jnp.expand_dims(scale, across)
    factor = jnp.where(jnp.expand_dims(live, across), scaled, old.factor)
    return Side(factor, jnp.where(live, new.lipschitz, old.lipschitz))


def _scales(factors: Factors, due: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
    """What balances the two sides of every block when it is due, else ones."""
    ones = {
        name: tuple(jnp.ones_like(side.lipschitz) for side in sides)
        for name, sides in factors.items()
    }

    def balanced() -> dict[str, tuple[jax.Array, ...]]:
        return {
            name: balance(*[side.factor.astype(ones[name][0].dtype) for side in sides])
            if len(sides) == 2
            else ones[name]
            for name, sides in factors.items()
        }

    return jax.lax.cond(due, balanced, lambda: ones)


def _noisy(blocks: jax.Array, learning: Learning, key: jax.Array | None) -> jax.Array:
    """G + noise, so that what is never observed has a scale too."""
    if learning.apply == "old" or (_is_zero(learning.noise_scale) and _is_zero(learning.damping)):
        return blocks
    size = learning.noise_scale
    if not _is_zero(learning.damping):
        within = tuple(range(1, blocks.ndim))
        size = size + learning.damping * root_mean_square(blocks, within)
    return blocks + size * noise(blocks.shape[1:], key, blocks.dtype)


def _limit(learning: Learning, sides: int) -> Any:
    """Of the entries of Q. With "old" factors the noise would be in the direction, and a parameter
    without gradients would drift: P is kept below 1/noise_scale instead, where noise keeps it."""
    if learning.apply == "new" or _is_zero(learning.noise_scale):
        return GROWTH_LIMIT
    floor = jnp.maximum(jnp.asarray(learning.noise_scale, jnp.float32), 1e-30)
    return jnp.minimum(GROWTH_LIMIT, floor ** (-0.5 / sides))


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0
