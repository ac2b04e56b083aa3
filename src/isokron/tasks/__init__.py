"""Things to train: a model, real examples and one loss per example."""

from isokron.tasks.catalog import load, names
from isokron.tasks.task import Batch, Examples, Task

__all__ = ["Batch", "Examples", "Task", "load", "names"]
