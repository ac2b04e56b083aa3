"""How Quad and Skew cut parameters into blocks, in plain numbers: for JAX and torch alike."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Shape = tuple[int, ...]

BLOCK_SIZE = 256
MAX_SIZE_DENSE = 16384
BALANCE_EVERY = 100
CLIP = 1.1  # the largest root mean square of a direction
ADAM_DIVISOR = 5.0  # brings a direction of RMS 1 to the length of Adam's usual step
GROWTH_LIMIT = 1e6  # of a factor's entries: what is never observed grows without bound
SQUARE_LIMIT = 1e15  # of |PG| where it is squared, so that float32 holds the sum of squares
POWER_STEPS = 6
PROBES = 4
GOLDEN = 1640531527  # ⌊2³²/φ²⌋, φ the golden ratio


def matrix_shape(shape: Sequence[int]) -> Shape:
    """One dimension if all but one are 1; else two: of all splits the squarest, the first of ties.

    (3, 8, 10) → (24, 10), (128, 3, 3, 3) → (128, 27), (1, 7) → (7,), () → (1,).
    """
    sizes = [size for size in shape if size != 1]
    if len(sizes) <= 1:
        return (sizes[0] if sizes else 1,)
    splits = [(math.prod(sizes[:i]), math.prod(sizes[i:])) for i in range(1, len(sizes))]
    return min(splits, key=lambda split: max(split) / max(1, min(split)))


def dense_sides(shape: Shape, max_size_dense: int) -> tuple[bool, ...]:
    """A matrix has a dense factor on every side that is not too large; a vector has none."""
    return tuple(len(shape) == 2 and size <= max_size_dense for size in shape)


def spans(size: int, block: int) -> list[tuple[int, int, int]]:
    """(start, size of a block, how many): the full blocks, then the one that is left over."""
    full, rest = divmod(size, block)
    found = [(0, block, full), (full * block, rest, 1)]
    return [(start, width, many) for start, width, many in found if width * many]


def factor_rate(
    step: Any,
    initial: Any,
    floor: Any = 0.4,
    *,
    minimum: Callable[..., Any] = min,
    maximum: Callable[..., Any] = max,
) -> Any:
    """max(plr₀ (1 + t/10⁴)^(−½), min(floor, plr₀)): the floor never raises a smaller rate.

    `minimum`, `maximum`: those of the numbers given, where they are not Python's.
    """
    return maximum(initial * (1 + step / 1e4) ** -0.5, minimum(floor, initial))


def scramble(row: Any, column: Any) -> Any:
    """(i+1)(j+1)(i+j+1)·2³²/φ², φ the golden ratio: modulo 2³² as good as random, of full rank.

    Probes and noise come of it, without a generator: `uniform` of it, for unsigned 32-bit integers
    or the lower half of larger ones, is the same on every device, in JAX and in torch.
    """
    return (row + 1) * (column + 1) * (row + column + 1) * GOLDEN


def uniform(bits: Any) -> Any:
    """√12 (x/2³² − ½): from floats in [0, 2³²) to mean 0 and mean square 1."""
    return (bits * 2.0**-32 - 0.5) * math.sqrt(12)
