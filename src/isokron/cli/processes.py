"""A command on several processes: who of them speaks, and how they end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from isokron.distributed import Ranks
    from isokron.distributed.launch import Launched

SHARED = ("attribute", "fit", "build", "score", "report", "tasks", "info")

_launched: Launched | None = None  # for all of the process's life, which torchrun began


def join() -> None:
    """Meet the other processes, if torchrun has started some; they must have the same call."""
    global _launched
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        return
    from isokron.distributed.launch import join

    _launched = join()
    if _launched is not None:
        if _launched.ranks.rank:
            # what all would print, one does
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        _launched.ranks.agree("the arguments of isokron", sys.argv[1:])


def ranks() -> Ranks | None:
    """The processes that share a command; None of one that is alone."""
    return None if _launched is None else _launched.ranks


def leads() -> bool:
    return _launched is None or _launched.ranks.rank == 0


def speaks(error: BaseException | None = None) -> bool:
    """Whether it is this process that tells of an error."""
    return _launched is None or _launched.speaks(error)


def check_shared(command: str | None) -> None:
    """Refuse a command whose work cannot be shared."""
    if _launched is not None and command is not None and command not in SHARED:
        raise ValueError(
            f"isokron {command} works on one process, and torchrun has started "
            f"{_launched.ranks.size}; start it without torchrun"
        )


def leave(code: int) -> NoReturn:
    """Exit, together with the others where all is well."""
    if _launched is None:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        _launched.leave()
    else:
        _launched.give_up()
    # others may wait in what this one has left, and threads of connections that end with the
    # process have been seen to abort it: nothing is waited for, nothing taken down
    os._exit(code)
