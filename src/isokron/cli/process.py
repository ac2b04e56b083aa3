"""The process of a command: its ranks under torchrun, its error message and its exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from isokron.cli.encoding import echo
from isokron.files import FULL
from isokron.names import hint

if TYPE_CHECKING:
    from isokron.distributed import Ranks
    from isokron.distributed.launch import Launched

# commands that cannot share their work among processes
SINGLE = ("demo", "race", "query", "evaluate", "inspect", "plan")

_launched: Launched | None = None  # the process group, until the process ends


class FailedWork(Exception):
    """The work failed, as opposed to a wrong call; the cause is the error."""


def join(arguments: Sequence[str]) -> None:
    """Join the process group if torchrun started several processes, all with the same arguments."""
    global _launched
    # checked here as well, so that a single process need not load torch
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        return
    from isokron.distributed.launch import join

    _launched = join()
    if _launched is None:
        return
    if _launched.ranks.rank:
        # the first rank prints the results
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    _launched.ranks.agree("the arguments of isokron", list(arguments))
    if arguments[0] in SINGLE:
        raise ValueError(
            f"isokron {arguments[0]} works on one process, and torchrun has started "
            f"{_launched.ranks.size}; start it without torchrun"
        )


def ranks() -> Ranks | None:
    """The processes that share the command; None if there is one."""
    return None if _launched is None else _launched.ranks


def leads() -> bool:
    """Whether this process prints and writes for all ranks."""
    return _launched is None or _launched.ranks.rank == 0


@contextmanager
def work(advice: str = "run the same command again to continue") -> Iterator[None]:
    """Errors inside are failed work (exit code 1); all others are a wrong call (exit code 2).

    advice: printed after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        if leads():
            echo(f"Interrupted: {advice}.", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        raise FailedWork from error


def complain(message: str, error: BaseException | None = None) -> None:
    """Print an error in one line, on one of the ranks."""
    if _launched is None or _launched.speaks(error):
        echo(f"isokron: error: {' '.join(message.split())}", err=True)


def report(error: Exception, options: Mapping[str, str]) -> int:
    """Print the error in one line and return the exit code; ISOKRON_TRACEBACK=1 raises it.

    options: argument → option of the command, by which the message names it.
    """
    cause = error.__cause__ if isinstance(error, FailedWork) else error
    assert isinstance(cause, Exception)
    if os.environ.get("ISOKRON_TRACEBACK"):
        raise cause
    if hasattr(cause, "format_message"):  # typer's; its class has moved between versions
        message = cause.format_message().replace("Value error, ", "")
        message = message.rstrip(".") + other_name(message, options)
    elif str(cause) and isinstance(cause, (ValueError, ImportError, OSError, FloatingPointError)):
        message = named_options(str(cause), options) + _place(cause)
    else:
        message = f"{type(cause).__name__}: {cause}{_place(cause)}"
    complain(message, cause)
    # a full disk and a package that is not installed are no wrong call
    full = isinstance(cause, OSError) and cause.errno in FULL
    return 1 if full or isinstance(error, FailedWork) or isinstance(cause, ImportError) else 2


def other_name(message: str, options: Mapping[str, str]) -> str:
    """What an option or command of another library, which there is none of here, is called."""
    match = re.search(r"No such (?:option|command):? '?-*([\w.-]+)", message)
    if match is None:
        return ""
    name = match[1].rpartition(".")[2].replace("-", "_")
    settings, text = hint("isokron", name, options, 1.0)
    for setting in settings:
        text = text.replace(repr(setting), options[setting])
    return f"; {text}" if text else ""


def named_options(message: str, options: Mapping[str, str]) -> str:
    """`steps must be …, lower lr=1` → `--steps must be …, lower --lr 1`: arguments as options.

    What is quoted is the user's and stays.
    """

    def option(match: re.Match[str]) -> str:
        name = options.get(match[1], match[1])
        if name == match[1]:
            return match[0]
        switch = {"=True": name, "=False": name.replace("--", "--no-", 1)}
        return switch.get(match[2], name + match[2].replace("=", " ").replace("'", ""))

    leading = re.sub(r"^(\w+)()(?=[ :])", option, message)
    quoted = r"(?<!\w)'[^']*'"
    return re.sub(rf"{quoted}|\b(\w+)(=True\b|=False\b|='\w+'|=(?=[\w.+'-]))", option, leading)


def _place(error: Exception) -> str:
    """The line of the user's code in which the error was raised, or ""."""
    library = (str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # skip frames of this package, of Python's library and of code without a file
        if not frame.filename.startswith(library) and "site-packages" not in frame.filename:
            name = Path(frame.filename).name
            return f" ({name}, line {frame.lineno}; ISOKRON_TRACEBACK=1 shows all)"
    return ""


def leave(code: int) -> NoReturn:
    """Exit; after success, together with the other ranks."""
    if _launched is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        if code == 0:
            _launched.leave()
        else:
            _launched.give_up()
    sys.exit(code)
