"""What thousands of modules cost: they are never garbage, and are not looked through for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Garbage is not looked for while packages load, and later not among what has been loaded.

    Loading torch and transformers takes a tenth less time, and so does the end of the process.
    """
    if not gc.isenabled():  # within another of these, or as whoever runs this wishes
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
