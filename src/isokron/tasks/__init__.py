"""What is trained: a model, examples and one loss per example."""

from isokron.tasks.catalog import load, names, resolved
from isokron.tasks.display import Shown
from isokron.tasks.task import Batch, Examples, Task

__all__ = ["Batch", "Examples", "Shown", "Task", "load", "names", "resolved"]
