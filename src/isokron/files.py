"""Files that are there whole or not at all, whenever the process dies and whoever else writes."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write beside, flush to disk, then rename: readers see the old file or the new one.

    The file beside has one fixed name, so that the next attempt writes over what a killed one left.
    Processes that write the same file take turns.
    """
    temporary = _beside(path)
    try:
        with _alone(temporary) as file:
            try:
                file.truncate(0)
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                if fcntl is not None:  # still alone
                    temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        if fcntl is None:  # an open file cannot be renamed
            temporary.replace(path)
        else:
            _flush_folder(path.parent)
    except OSError as error:
        raise _explained(path, error) from None


def clear_beside(path: Path) -> None:
    """Remove what a killed process left beside a file, unless one is writing there just now."""
    temporary = _beside(path)
    if not temporary.exists():
        return
    with temporary.open("ab") as file:
        if lock(file, wait=False) and _is_open(temporary, file):
            temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def _alone(temporary: Path) -> Iterator[BinaryIO]:
    """The file, made if need be, open to this process only; let go when it ends, however."""
    while True:
        with temporary.open("ab") as file:  # what another may be writing is not truncated here
            lock(file, wait=True)
            if _is_open(temporary, file):
                yield file
                return
        # another has renamed it meanwhile: this one has a file of its own to begin


def lock(file: BinaryIO, wait: bool) -> bool:
    """Whether this process may write; some shared disks have no locks, and all may."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def _is_open(path: Path, file: BinaryIO) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


def _flush_folder(folder: Path) -> None:
    """A rename itself must survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _explained(path: Path, error: OSError) -> OSError:
    """The same error, of the same number and so of the same class, with what to do about it."""
    remedy = "make its folder writable, or choose another"
    if error.errno in FULL:
        free = shutil.disk_usage(path.parent).free / 1e6
        remedy = (
            f"{free:,.1f} MB are free there; free some space, or raise the limit, and run the same "
            "command again: what is finished stays"
        )
    explained = f"could not write {str(path)!r}: {error.strerror or error}; {remedy}"
    return OSError(explained) if error.errno is None else OSError(error.errno, explained)
