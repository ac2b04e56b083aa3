"""Built-in tasks by name, and user objects by `module:name` or `file.py:name`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from isokron.tasks.task import Task

Item = TypeVar("Item", int, str)


DIGITS = "8×8 handwritten digits, small convolutional network"
MNIST = "28×28 handwritten digits, small convolutional network"
SPEECHES = "byte language model of US presidents' speeches, decoder transformer"
LLAMA = "byte-pair language model of the same speeches, Llama with a tied embedding"
# description, parameters and training examples, so that tasks can be listed without loading them
BUILT_IN = {
    "digits-tiny": (DIGITS, 38_378, 1_437),
    "digits-small": (DIGITS, 283_978, 1_437),
    "mnist-tiny": (MNIST, 47_690, 4_488),
    "mnist-small": (MNIST, 321_034, 4_488),
    "speeches-tiny": (SPEECHES, 135_808, 172_172),
    "speeches-small": (SPEECHES, 862_464, 172_172),
    "llama-bpe": (LLAMA, 1_880_480, 40_616),
}
# function that creates a task of any size → its module
MODULES = {"digits": "digits", "mnist": "digits", "speeches": "speeches", "llama": "llama"}


def names() -> list[str]:
    """The built-in tasks."""
    return list(BUILT_IN)


def load(spec: str) -> Task:
    """A task by built-in name, `module:function` or `path/to/file.py:function`.

    A bare `digits` means `digits-tiny`; the function takes no argument and returns a Task.
    """
    name = spec if spec in BUILT_IN else f"{spec}-tiny"
    if ":" in spec:
        function = load_object(spec, "task")
        task = function() if callable(function) else function
    elif name in BUILT_IN:
        function, _, size = name.rpartition("-")
        module = importlib.import_module(f"isokron.tasks.{MODULES[function]}")
        task = getattr(module, function)(size)
    else:
        close = difflib.get_close_matches(spec, [*BUILT_IN, *MODULES], n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(
            f"no task named {spec!r}; {hint}built in are {', '.join(BUILT_IN)}; "
            "give your own as module:function or path/to/file.py:function"
        )
    if not isinstance(task, Task):
        raise ValueError(
            f"task {spec!r} must return an isokron.Task, got {type(task).__name__}; "
            "end the function with: return Task(name=..., model=..., ...)"
        )
    return task


def load_object(spec: str, what: str) -> Any:
    """The object `module:name` or `path/to/file.py:name`. what: used in errors."""
    home, _, name = spec.rpartition(":")
    if not home or not name:
        raise ValueError(
            f"{what} {spec!r} is not of the form module:name; "
            "write for example package.module:name or path/to/file.py:name"
        )
    if home.endswith(".py") and not Path(home).is_file():
        raise ValueError(f"{what}: no file {home!r}; paths are relative to {Path.cwd()}")
    try:
        module = _run_file(home) if home.endswith(".py") else importlib.import_module(home)
    except ModuleNotFoundError as error:
        # a missing import within the module is another error
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise
        remedy = "install it, or give a file: path/to/file.py:name"
        raise ValueError(f"{what}: no module named {home!r}; {remedy}") from None
    try:
        return attrgetter(name)(module)
    except AttributeError:
        public = ", ".join(key for key in sorted(vars(module)) if not key.startswith("_"))
        raise ValueError(f"{what}: {home} has no {name!r}; it has {public:.200}") from None


def _run_file(path: str) -> ModuleType:
    name = f"isokron_file_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def resolved(source: str, *, task: bool = False) -> str:
    """A source that is independent of the working directory.

    Existing files, folders and `file.py:name` get an absolute path, other names do not change.
    task: a source without a colon is a built-in name, even if there is a folder of that name.
    """
    path, colon, name = source.rpartition(":")
    if not path.endswith(".py"):
        path, colon, name = "" if task else source, "", ""
    absolute = Path(path).expanduser().absolute()
    return f"{absolute}{colon}{name}" if path and absolute.exists() else source


def shuffled(items: Iterable[Item], salt: str) -> list[Item]:
    """Items in the order of their hashes: random, but the same on every machine."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{salt}:{item}".encode()).digest())


def import_optional(module: str, extra: str, why: str) -> Any:
    """Import a module of an optional dependency; the error says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{why}; install it with: pip install "isokron[{extra}]" (in a clone: ".[{extra}]")',
            name=error.name,
        ) from None
