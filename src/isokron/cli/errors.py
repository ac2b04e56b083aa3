"""Errors as one line on stderr and an exit code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from isokron.cli import several


def complain(message: str, code: int, error: BaseException | None = None) -> int:
    """Say what is wrong in one line, by one of several processes; returns the exit code."""
    if several.speaks(error):
        typer.echo(f"isokron: error: {' '.join(message.split())}", err=True)
    return code


@contextmanager
def reported(code: int) -> Iterator[None]:
    """Turn an exception into its message: code 2 around a call's checks, 1 around its work.

    ISOKRON_TRACEBACK=1 shows where it came from.
    """
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        if os.environ.get("ISOKRON_TRACEBACK"):
            raise
        known = isinstance(error, (ValueError, ImportError, OSError))
        message = str(error) if known and str(error) else f"{type(error).__name__}: {error}"
        message += _place(error)
        # a package that is not installed is not the call's fault
        code = 1 if isinstance(error, ImportError) else code
        raise typer.Exit(complain(message, code, error)) from None


def _place(error: Exception) -> str:
    """Where in the user's own code it happened, if it did."""
    ours = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(ours) and _is_own(f.filename)]
    if not own:
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}; ISOKRON_TRACEBACK=1 shows all)"


def _is_own(filename: str) -> bool:
    """Neither a package nor Python's own: what is left, the user wrote."""
    library = Path(traceback.__file__).parent
    return "site-packages" not in filename and not filename.startswith((str(library), "<"))
