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
