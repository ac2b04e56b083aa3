"""The value every command works on: a model, its examples, and one loss per example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from isokron.tasks.shown import Shown

if TYPE_CHECKING:
    from torch import Tensor, nn

    Batch: TypeAlias = tuple[Tensor, ...]
else:
    # torch stays unimported here, so that listing tasks is instant
    Batch: TypeAlias = tuple


@dataclass(frozen=True, eq=False)
class Examples:
    """Tensors of equal length, row i of each together being example i."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensors, tuple) or not self.tensors:
            raise ValueError(
                "Examples needs a tuple of at least one tensor, "
                f"got {type(self.tensors).__name__} {self.tensors!r:.60}; "
                "write Examples((inputs, targets))"
            )
        lengths = [len(tensor) for tensor in self.tensors]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"Examples needs tensors of equal length, got lengths {lengths}; "
                "give every tensor one row per example"
            )
        if lengths[0] == 0:
            raise ValueError("Examples needs at least one example, got tensors of length 0")

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: Tensor) -> Batch:
        """The rows `indices` of every tensor. indices: [n], integers."""
        return tuple(tensor[indices] for tensor in self.tensors)


@dataclass(frozen=True, eq=False)
class Task:
    """A model to train on examples.

    model: builds it fresh, from torch's current seed.
    loss: one loss per example, shape [n], for a batch of n.
    unit: what the loss measures, for labels.
    sample: shows in words what a trained model does.
    logits: where the loss is a cross-entropy, scores of classes, in the last dimension, and their
    integer targets, −100 where none counts. The curvature of one prediction, and labels drawn from
    the model, can be had of these only.
    show: what a person sees of each example of a batch.
    read: a batch of one example, made of a person's words.
    ids: a name of its own for every training example; left out, they are numbered.
    trained: whether `model` gives one that has been trained already.
    """

    name: str
    model: Callable[[], nn.Module]
    train: Examples
    evaluation: Examples
    loss: Callable[[nn.Module, Batch], Tensor]
    batch_size: int
    unit: str = "loss"
    sample: Callable[[nn.Module], str] | None = None
    logits: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]] | None = None
    show: Callable[[Batch], list[Shown]] | None = None
    read: Callable[[str], Batch] | None = None
    ids: Sequence[str] = ()
    trained: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("Task needs a name, got an empty string; it labels tables and files")
        for argument in ("train", "evaluation"):
            value = getattr(self, argument)
            if not isinstance(value, Examples):
                raise TypeError(
                    f"Task {argument} must be Examples, got {type(value).__name__}; "
                    "wrap the tensors: Examples((inputs, targets))"
                )
        if hasattr(self.model, "parameters") and not isinstance(self.model, type):
            raise TypeError(
                "Task model must be a function that makes a model, got a model; every run needs "
                "a fresh one: model=lambda: MyModel(...)"
            )
        for argument in ("model", "loss"):
            if not callable(getattr(self, argument)):
                raise TypeError(
                    f"Task {argument} must be callable, got "
                    f"{type(getattr(self, argument)).__name__}; pass a function"
                )
        optional = {
            "logits": "of model and batch that returns scores and targets",
            "show": "of a batch that returns one Shown an example",
            "read": "of a text that returns a batch of one example",
        }
        for argument, what in optional.items():
            value = getattr(self, argument)
            if value is not None and not callable(value):
                raise TypeError(
                    f"Task {argument} must be callable or None, got {type(value).__name__}; "
                    f"pass a function {what}"
                )
        if not 1 <= self.batch_size <= len(self.train):
            raise ValueError(
                f"Task batch_size must lie between 1 and the {len(self.train)} training examples, "
                f"got {self.batch_size}; choose a smaller batch"
            )
        self._check_ids()

    def _check_ids(self) -> None:
        if isinstance(self.ids, str):
            raise TypeError(f"Task ids must be a sequence of strings, got one, {self.ids!r:.60}")
        wrong = next((name for name in self.ids if not isinstance(name, str)), None)
        if wrong is not None:
            raise TypeError(
                f"Task ids must be strings, got {type(wrong).__name__} {wrong!r:.40}; "
                "make them so: ids=[str(name) for name in ids]"
            )
        if len(self.ids) not in (0, len(self.train)):
            raise ValueError(
                f"Task ids must name each of the {len(self.train)} training examples, got "
                f"{len(self.ids)}; leave them out and examples are numbered"
            )
        if len(set(self.ids)) < len(self.ids):
            first: dict[str, int] = {}
            for position, name in enumerate(self.ids):
                if name in first:
                    raise ValueError(
                        f"Task ids must differ, got {name!r} at positions {first[name]} and "
                        f"{position}; make each id unique"
                    )
                first[name] = position

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of every example of the batch, checked to be [n]."""
        losses = self.loss(model, batch)
        expected = (len(batch[0]),)
        shape = getattr(losses, "shape", None)
        if shape is None or tuple(shape) != expected:
            got = f"shape {tuple(shape)}" if shape is not None else type(losses).__name__
            raise ValueError(
                f"task {self.name!r}: loss must return one loss per example, shape {expected}, "
                f'got {got}; use reduction="none" and average within each example only'
            )
        return losses
