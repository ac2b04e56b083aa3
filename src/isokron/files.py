"""Atomic writes, and checks of folders that hold results."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a temporary file, flush it to disk and rename it: readers see the old or the new file.

    The temporary file has a fixed name, so that the next attempt overwrites what a killed process
    left. Processes that write the same file wait for each other.
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
                if fcntl is not None:  # still locked
                    temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        if fcntl is None:  # an open file cannot be renamed
            temporary.replace(path)
        else:
            _flush_folder(path.parent)
    except OSError as error:
        raise explained(path, error) from None


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically; numbers that are not finite are refused."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, [text.encode(), b"\n"])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Held by one process at a time for work on a file; others wait. It ends with the process."""
    lock_file = _beside(path, "lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(_alone(lock_file))
        except OSError as error:
            raise explained(path, error) from None
        try:
            yield
        finally:
            if fcntl is not None:  # still locked
                lock_file.unlink(missing_ok=True)
    if fcntl is None:  # an open file cannot be removed
        lock_file.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before work that would be lost."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise explained(folder, error) from None


def read_json(path: Path, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """The JSON object in a file, which has these keys; else an error that says what to do."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {remedy}") from None
    missing = (
        [key for key in keys if key not in value] if isinstance(value, dict) else ["a JSON object"]
    )
    if missing:
        raise ValueError(f"{path} is damaged: {', '.join(missing)} is missing; {remedy}")
    return dict(value)


def check_free(folder: Path, marker: str, ours: Collection[str] = ()) -> None:
    """Refuse a folder with other files than `ours` in it, unless the file `marker` is there."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file; give a new folder")
    # listed before the marker is looked for: another process may be writing both
    names = sorted(path.name for path in folder.glob("[!.]*") if path.name not in ours)
    if names and not (folder / marker).exists():
        raise ValueError(
            f"folder {str(folder)!r} has other files in it (such as {names[0]}); give a new folder"
        )


def check_same(folder: Path, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those recorded in a folder, naming each difference."""
    # compared as they are read from a file, where tuples are lists
    old, new = (json.loads(json.dumps(dict(settings))) for settings in (old, new))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if names:
        differ = "; ".join(f"{n} was {old.get(n)!r}, is {new.get(n)!r}" for n in names)
        raise ValueError(f"{folder} has another {what}: {differ}; give a new folder")


def clear_beside(path: Path) -> None:
    """Remove the hidden files that a killed process left, unless another is using them now."""
    for ending in ("tmp", "lock"):
        hidden = _beside(path, ending)
        if hidden.exists():
            with hidden.open("ab") as file:
                if lock(file, wait=False) and _is_open(hidden, file):
                    hidden.unlink(missing_ok=True)


def _beside(path: Path, ending: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{ending}")


@contextmanager
def _alone(temporary: Path) -> Iterator[BinaryIO]:
    """The file, opened and locked by this process; the lock ends with the process."""
    while True:
        with temporary.open("ab") as file:  # not truncated: another process may be writing it
            lock(file, wait=True)
            if _is_open(temporary, file):
                yield file
                return
        # another process has renamed it in the meantime: open a new one


def lock(file: BinaryIO, wait: bool, shared: bool = False) -> bool:
    """Whether the file could be locked; file systems without locks count as locked."""
    if fcntl is None:
        return True
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
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
    """Flush a folder to disk, so that a rename in it survives a power failure."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def explained(path: Path, error: OSError) -> OSError:
    """The same error, with the same number and class, and a message that says what to do."""
    remedy = "make its folder writable, or choose another"
    if error.errno in FULL:
        free = shutil.disk_usage(path.parent).free / 1e6
        remedy = (
            f"{free:,.1f} MB are free there; free some space, or raise the limit, and run the same "
            "command again: what is finished stays"
        )
    message = f"could not write {str(path)!r}: {error.strerror or error}; {remedy}"
    return OSError(message) if error.errno is None else OSError(error.errno, message)
