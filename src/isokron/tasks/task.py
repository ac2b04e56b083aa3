"""A task: a model, its examples, one loss per example, and how examples are displayed."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

    Batch: TypeAlias = tuple[Tensor, ...]
    Logits: TypeAlias = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
else:
    # torch is not imported here, so that listing tasks is instant
    Batch: TypeAlias = tuple
    Logits: TypeAlias = Callable


@dataclass(frozen=True, eq=False)
class Shown:
    """How an example is displayed: as text, an image, or both.

    tokens: pieces of the text; if the loss has one term per token, piece k is the k-th target.
    context: the text before the first token with a loss.
    image: uint8 [h, w] or [h, w, 3].
    generated: whether the model generated the tokens.
    """

    tokens: tuple[str, ...] = ()
    context: str = ""
    image: Tensor | None = None
    label: str = ""
    title: str = ""
    generated: bool = False

    @property
    def text(self) -> str:
        """The context and the tokens."""
        return self.context + "".join(self.tokens)

    def to_json(self) -> dict[str, Any]:
        """Non-empty fields as strings, lists and booleans; the image as PNG in base64."""
        image = "" if self.image is None else base64.b64encode(png(self.image)).decode()
        values = vars(self) | {"tokens": list(self.tokens), "image": image}
        return {name: value for name, value in values.items() if value}


def png(image: Tensor) -> bytes:
    """A PNG file of grey levels [h, w] or colours [h, w, 3], uint8."""
    grey, uint8 = image.ndim == 2, str(image.dtype) == "torch.uint8"
    if image.numel() == 0 or not uint8 or not (grey or image.shape[2:] == (3,)):
        raise ValueError(
            f"an image must be uint8 [h, w] or [h, w, 3], got {image.dtype} {list(image.shape)}; "
            "scale it to 0..255, with colours in the last dimension"
        )
    # every row begins with the number of its filter, 0 for none
    rows = b"".join(b"\0" + row.numpy().tobytes() for row in image.cpu().contiguous())
    size = struct.pack(">2I5B", image.shape[1], image.shape[0], 8, 0 if grey else 2, 0, 0, 0)
    chunks = (b"IHDR" + size, b"IDAT" + zlib.compress(rows, 9), b"IEND")
    # a signature, then chunks of length, type and data, and checksum
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in chunks
    )


@dataclass(frozen=True, eq=False)
class Examples:
    """Tensors of equal length: example i is row i of each."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        lengths = [len(tensor) for tensor in self.tensors if tensor.ndim]
        if not isinstance(self.tensors, tuple) or len(set(lengths)) != 1 or 0 in lengths:
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

    Args:
        name: shown in tables and on pages.
        model: returns a new model, initialized from torch's current seed.
        train: training examples.
        evaluation: examples that are not trained on, or None.
        loss: model, batch → one loss per example [n].
        batch_size: examples per training step.
        unit: unit of the loss, for labels.
        sample: model → a text that shows what it does.
        logits: for a cross-entropy: model, batch → class scores (last dimension) and integer
            targets, −100 where masked. The exact Fisher and token scores need it.
        show: batch → one Shown per example.
        read: a query as text → a batch of one example.
        prompt: (model, prompt, completion=None, max_new_tokens=32) → a batch of one example in
            which only the completion has a loss, and its Shown; None: the model generates it.
        said: model, batch → the model's prediction as text.
        ids: a unique name per training example; default: their numbers.
        lengths: tokens per training example, to batch examples of similar length.
        skipped: ids of documents that were skipped, having no token to predict.
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
    logits: Logits | None = None
    show: Callable[[Batch], list[Shown]] | None = None
    read: Callable[[str], Batch] | None = None
    prompt: Callable[..., tuple[Batch, Shown]] | None = None
    said: Callable[[nn.Module, Batch], str] | None = None
    ids: Sequence[str] = ()
    lengths: Sequence[int] | None = None
    skipped: tuple[str, ...] = ()
    trained: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.train, Examples) or not isinstance(self.evaluation, Examples | None):
            got = f"{type(self.train).__name__} and {type(self.evaluation).__name__}"
            rule = "train and evaluation must be Examples((inputs, targets))"
            raise TypeError(f"Task {rule}, the latter or None, got {got}")
        if hasattr(self.model, "parameters") and not isinstance(self.model, type):
            raise TypeError(
                "Task model must be a function that returns a new model, got a model; write "
                "model=lambda: MyModel(...)"
            )
        count = len(self.train)
        if not 1 <= self.batch_size <= count:
            raise ValueError(
                f"Task batch_size must lie between 1 and the {count} training examples, got "
                f"{self.batch_size}; choose a smaller batch"
            )
        for argument, values in (("ids", self.ids), ("lengths", self.lengths)):
            if values and len(values) != count:
                raise ValueError(
                    f"Task {argument} must be {count}, one per training example, got {len(values)}"
                )

    @property
    def held_out(self) -> Examples:
        """The evaluation examples; raises if the task has none."""
        if self.evaluation is None:
            raise ValueError(
                f"task {self.name!r} has no evaluation examples: all of its data are training "
                "data; give it some with evaluation=, or use training examples (train:0)"
            )
        return self.evaluation

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of every example of a batch, [n]; raises if `loss` has another shape."""
        losses, expected = self.loss(model, batch), (len(batch[0]),)
        shape = tuple(getattr(losses, "shape", ()))
        if shape != expected:
            raise ValueError(
                f"task {self.name!r}: loss must return one loss per example, shape {expected}, got "
                f"{type(losses).__name__} of shape {shape}; use "
                'reduction="none" and average within each example only'
            )
        return losses


def mean_cross_entropy(logits: Logits) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of a task with these logits: the mean over the targets of each example."""
    from torch.nn.functional import cross_entropy

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        scores, targets = logits(model, batch)
        terms = cross_entropy(scores.float().flatten(0, -2), targets.flatten(), reduction="none")
        shape = (len(targets), -1)
        return terms.view(shape).sum(1) / (targets != -100).view(shape).sum(1)

    return loss
