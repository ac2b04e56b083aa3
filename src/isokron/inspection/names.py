"""Names of layers, short enough to stand in a plot."""

from __future__ import annotations

from collections.abc import Sequence

LIMIT = 13


def short_layers(names: Sequence[str]) -> dict[str, str]:
    """The last parts of each dotted name that no other ends with, cropped to fit."""
    found = {}
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            ending = ".".join(parts[-count:])
            alike = [n for n in names if n == ending or n.endswith(f".{ending}")]
            if len(alike) == 1 and not ending.isdecimal():  # a number alone says too little
                break
        found[name] = _cropped(ending or "model")
    return found


def _cropped(text: str) -> str:
    """Both ends tell more than the beginning alone."""
    if len(text) <= LIMIT:
        return text
    end = (LIMIT - 1) // 2
    return f"{text[: LIMIT - 1 - end]}…{text[-end:]}"
