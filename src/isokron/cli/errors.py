"""Errors as one line on stderr and an exit code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer


def complain(message: str, code: int) -> int:
    """Say what is wrong in one line; returns the exit code."""
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
        # a package that is not installed is not the call's fault
        raise typer.Exit(complain(message, 1 if isinstance(error, ImportError) else code)) from None
