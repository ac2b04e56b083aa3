"""The built-in tasks by name, and objects of the user's by `module:name` or `file.py:name`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from isokron.tasks.task import Task

Item = TypeVar("Item", int, str)


class Listing(NamedTuple):
    """A built-in task as it is listed without loading it; a test checks the numbers."""

    about: str
    module: str
    parameters: int
    train: int
    evaluation: int


DIGITS = "8×8 handwritten digits, small convolutional network", "digits"
MNIST = "28×28 handwritten digits, small convolutional network", "digits"
SPEECHES = "byte language model of US presidents' speeches, decoder transformer", "speeches"

# function-size: the function of that name in the module makes the task
BUILT_IN = {
    "digits-tiny": Listing(*DIGITS, 38_378, 1_437, 360),
    "digits-small": Listing(*DIGITS, 283_978, 1_437, 360),
    "mnist-tiny": Listing(*MNIST, 47_690, 4_488, 512),
    "mnist-small": Listing(*MNIST, 321_034, 4_488, 512),
    "speeches-tiny": Listing(*SPEECHES, 135_808, 172_172, 256),
    "speeches-small": Listing(*SPEECHES, 862_464, 172_172, 256),
}


def names() -> list[str]:
    """The built-in tasks."""
    return list(BUILT_IN)


def load(spec: str) -> Task:
    """A task by built-in name, `module:function` or `path/to/file.py:function`.

    A bare `digits` means `digits-tiny`; the function takes no argument and returns a Task.
    """
    if ":" in spec:
        function = load_object(spec, "task")
        task = function() if callable(function) else function
        if not isinstance(task, Task):
            raise ValueError(
                f"task {spec!r} must return an isokron.Task, got {type(task).__name__}; "
                "end the function with: return Task(name=..., model=..., ...)"
            )
        return task
    name = spec if spec in BUILT_IN else f"{spec}-tiny"
    function, _, size = name.rpartition("-")
    if name not in BUILT_IN:
        close = difflib.get_close_matches(spec, [*BUILT_IN, "digits", "mnist", "speeches"], n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(
            f"no task named {spec!r}; {hint}built in are {', '.join(BUILT_IN)}; "
            "give your own as module:function or path/to/file.py:function"
        )
    module = importlib.import_module(f"isokron.tasks.{BUILT_IN[name].module}")
    built_in: Task = getattr(module, function)(size)
    return built_in


def load_object(spec: str, what: str) -> Any:
    """The object `module:name` or `path/to/file.py:name`. what: its kind, for errors."""
    home, _, name = spec.rpartition(":")
    if not home or not name:
        raise ValueError(
            f"{what} {spec!r} is not of the form module:name; "
            "write for example package.module:name or path/to/file.py:name"
        )
    value: Any = _module(home, what)
    public = ", ".join(n for n in sorted(vars(value)) if not n.startswith("_"))
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{what}: {home} has no {name!r}; it has {public:.200}")
        value = getattr(value, part)
    return value


def _module(home: str, what: str) -> ModuleType:
    if not home.endswith(".py"):
        try:
            return importlib.import_module(home)
        except ModuleNotFoundError as error:
            # a missing module that this one imports is not a wrong spec, and must be seen
            if error.name is None or not f"{home}.".startswith(f"{error.name}."):
                raise
            remedy = "install it, or give a file: path/to/file.py:name"
            raise ValueError(f"{what}: no module named {home!r}; {remedy}") from None
    if not Path(home).is_file():
        raise ValueError(f"{what}: no file {home!r}; paths are relative to {Path.cwd()}")
    name = f"isokron_file_{Path(home).stem}"
    spec = importlib.util.spec_from_file_location(name, home)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def resolved(source: str | Path, *, task: bool = False) -> str:
    """A source that means the same in any working directory.

    Existing files, folders and `file.py:name` get an absolute path; other names stay. task: a
    source without a colon is a built-in name, also if there is a folder of that name.
    """
    path, colon, name = str(source).rpartition(":")
    if not path.endswith(".py"):
        path, colon, name = ("" if task else str(source)), "", ""
    absolute = Path(path).expanduser().absolute()
    return f"{absolute}{colon}{name}" if path and absolute.exists() else str(source)


def shuffled(items: Iterable[Item], salt: str) -> list[Item]:
    """Items in the order of their hashes: random, and the same on every machine."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{salt}:{item}".encode()).digest())


def import_optional(module: str, extra: str, why: str) -> Any:
    """A module of an optional dependency, or an error that says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{why}; install it with: pip install "isokron[{extra}]" (in a clone: ".[{extra}]")',
            name=error.name,
        ) from None
