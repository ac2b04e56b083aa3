"""Things to train: a model, real examples and one loss per example."""

from isokron.tasks.catalog import load, names
from isokron.tasks.shown import Shown
from isokron.tasks.task import Batch, Examples, Task

__all__ = ["Batch", "Examples", "Shown", "Task", "load", "names"]
