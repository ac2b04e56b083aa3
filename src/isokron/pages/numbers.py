"""Numbers as people read them, and as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def memory(count: int) -> str:
    """Bytes in the largest unit that leaves a number above one."""
    exponent = min(3, int(math.log(count, 1024))) if count else 0
    unit = ("B", "KiB", "MiB", "GiB")[exponent]
    return f"{count / 1024**exponent:.{0 if exponent == 0 else 1}f} {unit}"


def finite(value: Any) -> Any:
    """JSON has no infinity: null says that there is no such number."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def signed(value: float) -> str:
    """A score with its sign, to about three digits: +0.0123, −128,714, +1.2e-07."""
    size = abs(value)
    if not math.isfinite(size):
        text = str(size)
    elif size >= 1e7 or 0 < size < 1e-3:
        text = f"{size:.2e}"
    elif size >= 100:
        text = f"{size:,.0f}"
    else:
        text = f"{size:#.3g}".removesuffix(".") if size else "0"
    return ("−" if value < 0 else "+" if value > 0 else "") + text
