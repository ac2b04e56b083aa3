"""The value every command works on: a model, its examples, and one loss per example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from isokron.tasks.display import Shown

if TYPE_CHECKING:
    from torch import Tensor, nn

    Batch: TypeAlias = tuple[Tensor, ...]
else:
    # torch is not imported here, so that listing tasks is instant
    Batch: TypeAlias = tuple

FUNCTIONS = ("sample", "logits", "show", "read", "prompt", "said")  # what a task may leave out


@dataclass(frozen=True, eq=False)
class Examples:
    """Tensors of equal length: example i is row i of each."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        is_tuple = isinstance(self.tensors, tuple)
        lengths = [len(tensor) for tensor in self.tensors] if is_tuple else []
        if not lengths or len(set(lengths)) > 1 or lengths[0] == 0:
            raise ValueError(
                "Examples needs a tuple of tensors of equal length, one row per example, got "
                f"{type(self.tensors).__name__} of lengths {lengths}; write Examples((inputs, "
                "targets))"
            )

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: Tensor) -> Batch:
        """The rows `indices` of every tensor. indices: [n], integers."""
        return tuple(tensor[indices] for tensor in self.tensors)


@dataclass(frozen=True, eq=False)
class Task:
    """A model to train on examples.

    model: makes a new model, initialized from torch's current seed.
    evaluation: examples that are not trained on, or None.
    loss: model, batch → one loss per example [n]. unit: what it measures, for labels.
    sample: model → a text that shows what it does.
    logits: where the loss is a cross-entropy: model, batch → class scores (last dimension) and
        integer targets, −100 where none counts. Exact Fisher and token scores need it.
    show: batch → one Shown per example.
    read: a query in words → a batch of one example.
    prompt: (model, prompt, completion=None, max_new_tokens=32) → a batch of one example, in which
        only the completion has a loss, and its Shown; without a completion the model writes it.
    said: model, batch → what the model predicts there, as text.
    ids: a unique name per training example; empty, they are numbered.
    lengths: tokens of each training example, for batches of examples of similar length.
    skipped: ids of documents that were left out, having no token to predict.
    trained: whether `model` returns a trained model.
    """

    name: str
    model: Callable[[], nn.Module]
    train: Examples
    evaluation: Examples | None
    loss: Callable[[nn.Module, Batch], Tensor]
    batch_size: int
    unit: str = "loss"
    sample: Callable[[nn.Module], str] | None = None
    logits: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]] | None = None
    show: Callable[[Batch], list[Shown]] | None = None
    read: Callable[[str], Batch] | None = None
    prompt: Callable[..., tuple[Batch, Shown]] | None = None
    said: Callable[[nn.Module, Batch], str] | None = None
    ids: Sequence[str] = ()
    lengths: Sequence[int] | None = None
    skipped: tuple[str, ...] = ()
    trained: bool = False

    def __post_init__(self) -> None:
        count = len(self.train) if isinstance(self.train, Examples) else 0
        for argument in ("train", "evaluation", "model", "loss", *FUNCTIONS):
            value, examples = getattr(self, argument), argument in ("train", "evaluation")
            if value is None and argument in ("evaluation", *FUNCTIONS):
                continue
            if not (isinstance(value, Examples) if examples else callable(value)):
                rule = "Examples((inputs, targets))" if examples else "a function"
                raise TypeError(f"Task {argument} must be {rule}, got {type(value).__name__}")
        if hasattr(self.model, "parameters") and not isinstance(self.model, type):
            raise TypeError(
                "Task model must be a function that makes a model, got a model; every run needs "
                "a new one: model=lambda: MyModel(...)"
            )
        if not 1 <= self.batch_size <= count:
            raise ValueError(
                f"Task batch_size must lie between 1 and the {count} training examples, got "
                f"{self.batch_size}; choose a smaller batch"
            )
        if self.lengths is not None and len(self.lengths) != count:
            raise ValueError(f"Task lengths must be {count}, one per training example")
        strings = not isinstance(self.ids, str) and all(isinstance(name, str) for name in self.ids)
        if self.ids and not (strings and len(self.ids) == len(set(self.ids)) == count):
            twice = [repr(name) for name, uses in Counter(self.ids).items() if uses > 1]
            raise ValueError(
                f"Task ids must be {count} different strings, one per training example, got "
                f"{len(self.ids)} ({'none' if not twice else twice[0]} twice) in {self.ids!r:.60}; "
                "leave them out and examples are numbered"
            )

    @property
    def held_out(self) -> Examples:
        """The evaluation examples, or an error if the task has none."""
        if self.evaluation is None:
            raise ValueError(
                f"task {self.name!r} has no evaluation examples: all of its data are training "
                "data; give it some with evaluation=, or use training examples (train:0)"
            )
        return self.evaluation

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of every example of the batch, checked to be [n]."""
        losses, expected = self.loss(model, batch), (len(batch[0]),)
        shape = tuple(getattr(losses, "shape", ()))
        if shape != expected:
            raise ValueError(
                f"task {self.name!r}: loss must return one loss per example, shape {expected}, got "
                f"{type(losses).__name__} of shape {shape}; use "
                'reduction="none" and average within each example only'
            )
        return losses
