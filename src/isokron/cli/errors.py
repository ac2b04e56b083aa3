"""Errors as one line on stderr and an exit code."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from isokron.cli import processes

OPTIONS: dict[str, str] = {}  # of the command that runs: argument → option


def complain(message: str, code: int, error: BaseException | None = None) -> int:
    """Print the message in one line, on one of several ranks; returns the exit code."""
    if processes.speaks(error):
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
        expected = isinstance(error, (ValueError, ImportError, OSError)) and str(error)
        message = named_options(str(error)) if expected else f"{type(error).__name__}: {error}"
        # a package that is not installed is not the call's fault
        code = 1 if isinstance(error, ImportError) else code
        raise typer.Exit(complain(message + _place(error), code, error)) from None


def named_options(message: str) -> str:
    """`steps must be …, lower lr=1` → `--steps must be …, lower --lr 1`: arguments as options."""

    def option(match: re.Match[str]) -> str:
        name = OPTIONS.get(match[1])
        return match[0] if name is None else f"{name} " if match[0].endswith("=") else name

    return re.sub(r"\b(\w+)=(?=[\w.+-])", option, re.sub(r"^(\w+)(?=[ :])", option, message))


def _place(error: Exception) -> str:
    """Where in the user's own code it happened, if it did."""
    library = (str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent), "<")
    # frames of this package, of Python's library and of code without a file are not the user's
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(library) and "site-packages" not in frame.filename
    ]
    if not frames:
        return ""
    name, line = Path(frames[-1].filename).name, frames[-1].lineno
    return f" ({name}, line {line}; ISOKRON_TRACEBACK=1 shows all)"
