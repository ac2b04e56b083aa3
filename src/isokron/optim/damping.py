"""Levenberg–Marquardt damping: as little as the quadratic model can do with."""

LEAST, MOST = 1e-10, 1e4  # between which it is adapted


def adapted(damping: float, change: float, expected: float, omega: float) -> float:
    """ρ = change / expected of the loss; λ ← ωλ where ρ > ¾, λ/ω where ρ < ¼."""
    ratio = change / expected if expected < 0 else 0.5
    if not ratio >= 0.25:  # NaN too: the loss has left the numbers
        damping /= omega
    elif ratio > 0.75:
        damping *= omega
    return min(max(damping, LEAST), MOST)
