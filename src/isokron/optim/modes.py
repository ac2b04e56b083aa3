"""How ranks share one side of a layer: the sum of squares, the vectors themselves, or their rows.

U = [U₁ … U_R] are the vectors of all ranks, d×T. Σ UᵣUᵣᵀ = UUᵀ may be added up; Σ UᵣᵀUᵣ may not: it
lacks the products of one rank's vectors with another's.
"""

from collections.abc import Sequence

MODES = ("auto", "covariance", "gather", "gram")
# of T/d: under it vectors are less than the half of UUᵀ that travels, with some room for padding
# and for the products that every rank then makes of all vectors
RHO = 0.75
LARGE = 16384  # sides past which UUᵀ in float32 takes more than 1 GiB


def mode_of(width: int, terms: int, reduce: str = "auto", gram: bool = True) -> str:
    """What `reduce` comes to for a side of d = `width` with T = `terms` on all ranks together.

    auto: "gram" for d > 16384 and T < d, else "covariance" for T ≥ ¾d, else "gather". gram: for
    T < d, else as auto. `gram`: whether the side can be kept as vectors, which those of inputs and
    of EK-FAC can not.
    """
    if reduce in ("covariance", "gather"):
        return reduce
    if gram and terms < width and (reduce == "gram" or width > LARGE):
        return "gram"
    return "covariance" if terms >= RHO * width else "gather"


def bytes_sent(mode: str, width: int, counts: Sequence[int], itemsize: int, rank: int = 0) -> int:
    """What `rank` sends in a look at one side, `counts` being T of every rank.

    covariance  d(d+1)(R−1)/R          half of UUᵀ, all-reduced
    gather      max Tᵣ·d(R−1)          all-gathered, padded to the longest
    gram        Tᵣ·d(R−1)/R            all to all; each rank keeps d/R rows of U
    """
    ranks = len(counts)
    if mode == "covariance":
        return width * (width + 1) * itemsize * (ranks - 1) // ranks
    if mode == "gather":
        return max(counts) * width * itemsize * (ranks - 1)
    own = width * (rank + 1) // ranks - width * rank // ranks
    return counts[rank] * (width - own) * itemsize
