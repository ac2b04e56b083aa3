"""What is trained: a model, examples and one loss per example."""

from isokron.tasks.catalog import load, names
from isokron.tasks.task import Batch, Examples, Shown, Task

__all__ = ["Batch", "Examples", "Shown", "Task", "load", "names"]
