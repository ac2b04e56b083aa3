"""One step of all blocks: factors balanced and learned when that is due, and the direction."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isokron.jax.chunks import chunk_rows, in_chunks, largest_entries
from isokron.jax.factors import Method, balance
from isokron.jax.learning import Probes, learn
from isokron.jax.noise import noise
from isokron.jax.whitening import Batches, Factors, Side, Sides, scaled, whiten
from isokron.white_kron import BALANCE_EVERY, GROWTH_LIMIT


class Learning(NamedTuple):
    """How the factors learn: the arguments of scale_by_quad that say so."""

    method: Method
    every: Any
    warmup: Any
    apply: str
    noise_scale: Any
    damping: Any
    together: bool

    def due(self, count: jax.Array) -> jax.Array | bool:
        if isinstance(self.every, int) and self.every == 1:
            return True
        return (count <= self.warmup) | ((count - self.warmup) % self.every == 0)

    def balances(self, count: jax.Array) -> jax.Array:
        """At every hundredth step, or the first update after it."""
        last = count - jnp.where(count <= self.warmup, 1, self.every)
        return count // BALANCE_EVERY != jnp.maximum(last, 0) // BALANCE_EVERY

    def limit(self, sides: int) -> jax.typing.ArrayLike:
        """Of the entries of Q. With "old" factors noise would be in the direction, and a parameter
        without gradients would drift: P is kept below 1/noise_scale there, as noise would."""
        if self.apply == "new" or _is_zero(self.noise_scale):
            return GROWTH_LIMIT
        floor = jnp.maximum(jnp.asarray(self.noise_scale, jnp.float32), 1e-30)
        return jnp.minimum(GROWTH_LIMIT, floor ** (-0.5 / sides))


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
    """Directions, and the factors after this step; blocks that are not `live` keep theirs.

    Batches that overflow the cache go through it one by one, in chunks; the others all at once,
    which makes fewer and larger operations. Blocks that are spread over devices stay as they lie.
    """
    sizes = {
        name: chunk_rows(blocks.shape[0], largest_entries((blocks, factors[name])))
        for name, blocks in batches.items()
    }
    large = [n for n, size in sizes.items() if learning.together and size < len(batches[n])]
    small = [name for name in batches if name not in large]

    def part(names: list[str]) -> tuple[Batches, Factors, Batches]:
        return (
            {name: batches[name] for name in names},
            {name: factors[name] for name in names},
            {name: live[name] for name in names},
        )

    def work(some: tuple[Batches, Factors, Batches]) -> tuple[Batches, Factors]:
        return _step(learning, *some, count, rate, probes, key)

    directions, moved = work(part(small)) if small else ({}, {})
    for name in large:
        direction, factor = in_chunks(work, part([name]), sizes[name])
        directions |= direction
        moved |= factor
    return directions, moved


def _step(
    learning: Learning,
    batches: Batches,
    factors: Factors,
    live: Batches,
    count: jax.Array,
    rate: jax.Array,
    probes: Probes,
    key: jax.Array | None,
) -> tuple[Batches, Factors]:
    symmetric = learning.method.symmetric

    def whitened(blocks: Batches, with_factors: Factors) -> Batches:
        return {name: whiten(each, with_factors[name], symmetric) for name, each in blocks.items()}

    def keep() -> tuple[Batches, Factors]:
        return whitened(batches, _worked(factors)), factors

    def move() -> tuple[Batches, Factors]:
        old = _worked(factors)
        noisy = {name: _noisy(blocks, learning, key) for name, blocks in batches.items()}
        whites = whitened(noisy, old)
        limits = {name: learning.limit(len(sides)) for name, sides in old.items()}
        learned, shown = learn(
            whites, old, learning.method, rate, probes, limits, learning.together
        )
        scales = _scales(old, learning.balances(count))
        new = {
            name: tuple(
                _chosen(live[name] & shown[name], *each)
                for each in zip(learned[name], sides, scales[name], strict=True)
            )
            for name, sides in old.items()
        }
        directions = whites if learning.apply == "old" else whitened(batches, new)
        return directions, jax.tree.map(lambda x, like: x.astype(like.dtype), new, factors)

    due = learning.due(count)
    return move() if due is True else jax.lax.cond(due, move, keep)


def _worked(factors: Factors) -> Factors:
    """In the dtype that is worked in, which is that of L."""
    return {
        name: tuple(
            Side(side.factor.astype(side.lipschitz.dtype), side.lipschitz) for side in sides
        )
        for name, sides in factors.items()
    }


def _chosen(live: jax.Array, new: Side, old: Side, scale: jax.Array) -> Side:
    """What was learned, balanced; but where a block is not live, what it had."""
    # P does not see the balance, so it may as well come after the step as before
    factor = jnp.where(
        jnp.expand_dims(live, tuple(range(1, new.factor.ndim))),
        scaled(new.factor, scale),
        old.factor,
    )
    return Side(factor, jnp.where(live, new.lipschitz, old.lipschitz))


def _scales(factors: Factors, due: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
    """What balances the two sides of every block when it is due, else ones."""
    ones = {
        name: tuple(jnp.ones_like(side.lipschitz) for side in sides)
        for name, sides in factors.items()
    }

    def balanced(sides: Sides, alone: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return balance(*[side.factor for side in sides]) if len(sides) == 2 else alone

    return jax.lax.cond(
        due,
        lambda: {name: balanced(sides, ones[name]) for name, sides in factors.items()},
        lambda: ones,
    )


def _noisy(blocks: jax.Array, learning: Learning, key: jax.Array | None) -> jax.Array:
    """G + noise, so that what is never observed has a scale too."""
    if learning.apply == "old" or (_is_zero(learning.noise_scale) and _is_zero(learning.damping)):
        return blocks
    size = learning.noise_scale
    if not _is_zero(learning.damping):
        largest = jnp.max(jnp.abs(blocks), axis=tuple(range(1, blocks.ndim)), keepdims=True)
        size = size + learning.damping * largest
    return blocks + size * noise(blocks.shape[1:], key, blocks.dtype)


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0
