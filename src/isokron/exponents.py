"""The p of roots A^(−1/p), Shampoo's and Katie's, and what a root may be asked for.

For torch and JAX alike.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

SOLVERS = ("eigh", "newton", "higher")
DEFICIENT = ("relative", "lift", "pseudo")

Exponent = float | Mapping[int, float | Sequence[float]] | None


def exponents(group: Mapping[str, Any], order: int) -> list[float]:
    """p of every dimension of a block of this order."""
    given = group["exponent"]
    if isinstance(given, Mapping):
        given = given.get(order)
    if given is None:
        # KL factors are those of the covariance itself, of which an inverse half is wanted
        return [2.0 if group["statistic"] == "kl" else 2.0 * order] * order
    roots = list(given) if isinstance(given, Sequence) else [given] * order
    if len(roots) != order or not all(isinstance(p, (int, float)) and p >= 0 for p in roots):
        raise ValueError(
            f"exponent must be a number of at least 0, or {{order: number or one a "
            f"dimension}}, got {group['exponent']!r}"
        )
    return [float(p) for p in roots]


def check_root(
    root: float,
    damping: float = 0.0,
    *,
    solver: str = "eigh",
    deficient: str = "lift",
    rtol: float | None = None,
    atol: float = 0.0,
) -> None:
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {SOLVERS}, got {solver!r}")
    if deficient not in DEFICIENT:
        raise ValueError(f"deficient must be one of {DEFICIENT}, got {deficient!r}")
    if not 0 < root < math.inf:
        raise ValueError(f"root must be a positive number, got {root!r}")
    if solver != "eigh" and root != int(root):
        raise ValueError(
            f"root must be an integer for solver={solver!r}, got {root!r}; use solver='eigh'"
        )
    for name, value in (("damping", damping), ("rtol", rtol or 0.0), ("atol", atol)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    if deficient == "pseudo" and damping != 0:
        raise ValueError(
            f"damping must be 0 for deficient='pseudo', got {damping!r}; use another of {DEFICIENT}"
        )
    if deficient == "pseudo" and solver != "eigh":
        raise ValueError(
            f"solver must be 'eigh' for deficient='pseudo', got {solver!r}: "
            "only eigenvalues tell what is deficient"
        )
