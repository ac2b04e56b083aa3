"""The built-in tasks by name, and the user's own by `module:function`."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from isokron.tasks.loading import load_object
from isokron.tasks.task import Task


@dataclass(frozen=True)
class Listing:
    """What is told about a built-in task without loading it; a test keeps the numbers true."""

    about: str
    home: str
    function: str
    size: str
    parameters: int
    train: int
    evaluation: int


DIGITS = "8×8 handwritten digits, small convolutional network"
MNIST = "28×28 handwritten digits, small convolutional network"
SPEECHES = "byte language model of US presidents' speeches, decoder transformer"

BUILT_IN = {
    "digits-tiny": Listing(DIGITS, "images", "digits", "tiny", 38_378, 1_437, 360),
    "digits-small": Listing(DIGITS, "images", "digits", "small", 283_978, 1_437, 360),
    "mnist-tiny": Listing(MNIST, "images", "mnist", "tiny", 47_690, 4_488, 512),
    "mnist-small": Listing(MNIST, "images", "mnist", "small", 321_034, 4_488, 512),
    "speeches-tiny": Listing(SPEECHES, "speeches", "speeches", "tiny", 135_808, 172_172, 256),
    "speeches-small": Listing(SPEECHES, "speeches", "speeches", "small", 862_464, 172_172, 256),
}


def names() -> list[str]:
    """The built-in tasks."""
    return list(BUILT_IN)


def load(spec: str) -> Task:
    """A task by built-in name, `module:function` or `path/to/file.py:function`.

    A bare `digits` means `digits-tiny`; the function takes no argument and returns a Task.
    """
    if ":" in spec:
        return _user_task(spec)
    name = spec if spec in BUILT_IN else f"{spec}-tiny"
    if name not in BUILT_IN:
        known = [*BUILT_IN, *dict.fromkeys(listing.function for listing in BUILT_IN.values())]
        close = difflib.get_close_matches(spec, known, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(
            f"no task named {spec!r}; {hint}built in are {', '.join(BUILT_IN)}; "
            "your own is given as module:function or path/to/file.py:function"
        )
    listing = BUILT_IN[name]
    module = importlib.import_module(f"isokron.tasks.{listing.home}")
    task: Task = getattr(module, listing.function)(listing.size)
    return task


def _user_task(spec: str) -> Task:
    function = load_object(spec, "task")
    task = function() if callable(function) else function
    if not isinstance(task, Task):
        raise ValueError(
            f"task {spec!r} must return an isokron.Task, got {type(task).__name__}; "
            "end the function with: return Task(name=..., model=..., ...)"
        )
    return task
