"""C code of this folder, compiled on first use by the system's compiler and kept for the next time.

Nothing here is needed for a right result. Without a compiler, with one that fails or hangs, or on
a machine where a kernel's bits are not torch's, callers get None and let torch do it; `status`
says why. ISOKRON_NATIVE=0 switches it all off. ISOKRON_CACHE, else XDG_CACHE_HOME/isokron, else
~/.cache/isokron, is where compiled code is kept.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Every operation rounds as it is written: no reordering, no fusing but where the source says so.
# Neither errno nor floating-point exceptions are looked at, and waiving them changes no value.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
LINKED = ["-fPIC", "-shared", "-lm"]
TIMEOUT = 60.0  # seconds that a compiler may take
DIGEST = hashlib.sha256().digest_size


class Unavailable(Exception):
    """Why there is no native code."""


class Native:
    """One C file. `check`: whether the loaded code does its work here; raises Unavailable if not.

    Built and checked once a process, by whichever thread comes first.
    """

    def __init__(
        self,
        source: str,
        check: Callable[[ctypes.CDLL], None],
        defines: Callable[[], Sequence[str]] = list,
    ) -> None:
        self.source = Path(__file__).parent / source
        self.check = check
        self.defines = defines
        self._library: ctypes.CDLL | None = None
        self._reason = ""
        self._renew_lock()
        # the thread that holds the lock does not exist in a forked child
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def library(self) -> ctypes.CDLL | None:
        """The compiled code, or None where it cannot be used."""
        if _switched_off():
            return None
        if not self._reason:
            with self._lock:
                if not self._reason:
                    self._library, self._reason = self._load()
                    logger.debug("%s: %s", self.source.name, self._reason)
        return self._library

    def status(self) -> tuple[str, str]:
        """Which path is taken, "native" or "torch", and why; builds if nothing has been built."""
        if _switched_off():
            return "torch", f"switched off by ISOKRON_NATIVE={os.environ['ISOKRON_NATIVE']}"
        return "torch" if self.library() is None else "native", self._reason

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def _load(self) -> tuple[ctypes.CDLL | None, str]:
        try:
            compiler = _compiler()
            version = _output([*compiler, "--version"])
            library, where = self._built(compiler, version)
            self.check(library)
        except Unavailable as reason:
            return None, str(reason)
        except Exception as error:  # whatever it is, torch can do the work
            logger.debug("no native code", exc_info=True)
            return None, f"{type(error).__name__}: {error}"
        return library, f"compiled by {version.splitlines()[0]}, kept in {where}"

    def _built(self, compiler: Sequence[str], version: str) -> tuple[ctypes.CDLL, Path]:
        """The code from the cache or, if there is none that is whole, from the compiler."""
        flags = [*FLAGS, *self.defines()]
        command = [*compiler, *flags, str(self.source), *LINKED]
        source = self.source.read_text(encoding="utf-8")
        parts = [source, *compiler, *flags, *LINKED, version, _processor(), torch.__version__]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        failure = Unavailable("no directory to keep compiled code in")
        code = b""
        for directory in _directories():
            path = directory / f"{self.source.stem}-{key}.so"
            try:
                if not _whole(path):
                    code = code or _compiled(command)
                    _keep(code, path)
                return ctypes.CDLL(str(path)), directory
            except OSError as error:  # read-only, full, or its files may not be executed
                failure = Unavailable(f"{directory}: {error}")
        raise failure


def _switched_off() -> bool:
    return os.environ.get("ISOKRON_NATIVE", "").lower() in ("0", "no", "off", "false")


def _compiler() -> list[str]:
    if os.environ.get("CC", "").strip():
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise Unavailable("no C compiler: neither CC is set nor is there a cc, gcc or clang")


def _output(command: Sequence[str]) -> str:
    """What a command prints."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took longer than {TIMEOUT:g} seconds") from None
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be run: {error}") from None
    if done.returncode or not (done.stdout or done.stderr or "--version" not in command):
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{command[0]} failed: {said[0] if said else done.returncode}")
    return done.stdout or done.stderr


def _compiled(command: Sequence[str]) -> bytes:
    """What the compiler makes."""
    with tempfile.TemporaryDirectory(prefix="isokron-") as made:
        library = Path(made) / "library.so"
        _output([*command, "-o", str(library)])
        code = library.read_bytes() if library.is_file() else b""
    if not code:
        raise Unavailable(f"{command[0]} wrote nothing")
    return code


def _keep(code: bytes, path: Path) -> None:
    """Write beside `path` and take its place at once; the digest of the code is at its end."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code + hashlib.sha256(code).digest())
        Path(name).chmod(0o755)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _whole(path: Path) -> bool:
    """Whether the file ends with the digest of all before: loading half of one would crash."""
    content = path.read_bytes() if path.is_file() else b""
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _directories() -> Iterator[Path]:
    """Where compiled code is kept, then a directory of this process's own."""
    if os.environ.get("ISOKRON_CACHE"):
        yield Path(os.environ["ISOKRON_CACHE"]).absolute()
    elif os.environ.get("XDG_CACHE_HOME"):
        yield Path(os.environ["XDG_CACHE_HOME"]).absolute() / "isokron"
    else:
        with contextlib.suppress(RuntimeError):  # a user without a home
            yield Path.home() / ".cache" / "isokron"
    own = tempfile.mkdtemp(prefix="isokron-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    yield Path(own)


def _processor() -> str:
    """What -march=native depends on: a cache on a shared home serves machines of many kinds."""
    told = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    info = Path("/proc/cpuinfo")
    if info.is_file():
        first = info.read_text().split("\n\n")[0].splitlines()
        told += [
            line for line in first if line.split("\t")[0] in ("model name", "flags", "Features")
        ]
    return "\n".join(told)


def torch_symbols(names: Sequence[str]) -> dict[str, int]:
    """Addresses of C functions in torch's CPU library and in what it is linked to.

    Its OpenMP runtime is among them, so that no second one, with threads of its own, is started.
    """
    libraries = Path(torch.__file__).parent / "lib"
    try:
        library = ctypes.CDLL(str(next(libraries.glob("*torch_cpu.*"))))
        found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names}
    except (StopIteration, OSError, AttributeError) as error:
        raise Unavailable(f"torch's library lacks {error}") from None
    return {name: address for name, address in found.items() if address}


@functools.cache
def core_setter(name: str) -> Callable[[int], object] | None:
    """A function of torch's libraries that sets a number of cores, None where there is none."""
    try:
        address = torch_symbols([name])[name]
    except (Unavailable, KeyError):
        return None
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(address)
