"""Philox4x32-10: four random words that depend on a counter and a key, and on nothing else.

Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (SC 2011). All of it is
integer arithmetic on int64 tensors, so every device and every batching gives the same bits.
"""

from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by each round: golden ratio, √3 − 1
ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four words in [0, 2³²), as int64, of counters of four words each; shapes broadcast."""
    a, b, c, d = counter
    left, right = key
    for _ in range(ROUNDS):
        high_a, low_a = _multiply(a, MULTIPLIERS[0])
        high_c, low_c = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a
        left, right = (left + WEYL[0]) & MASK, (right + WEYL[1]) & MASK
    return a, b, c, d


def _multiply(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word of x · by, both below 2³²; halves of `by` keep products below 2⁴⁸."""
    upper, lower = x * (by >> 16), x * (by & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & MASK
    return high, low
