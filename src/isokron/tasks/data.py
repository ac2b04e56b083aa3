"""Packaged data sets, and a shuffle that is the same on every machine."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import TypeVar

Item = TypeVar("Item", int, str)


def shuffled(items: Iterable[Item], salt: str) -> list[Item]:
    """Items in the order of their hashes: random, yet free of any generator's version."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{salt}:{item}".encode()).digest())


def import_data(module: str, package: str) -> ModuleType:
    """The module of a data package, or an error that says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this task needs the package {package}; install it with: "
            'pip install "isokron[tasks]" (in a clone: pip install ".[tasks]")',
            name=error.name,
        ) from None
