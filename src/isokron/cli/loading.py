"""Packages of thousands of modules, loaded without looking for garbage among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Garbage is not looked for: loading torch and transformers takes a tenth less time.

    gc.freeze() afterwards would save more, when the process ends, but triton's binding then
    complains of leaks.
    """
    if not gc.isenabled():  # within another of these, or as whoever runs this wishes
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
