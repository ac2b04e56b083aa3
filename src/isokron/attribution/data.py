"""Training data of any kind, read by index, in batches of similar length."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from isokron.curvature.backward import refuse_nonfinite
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood, Loss
from isokron.digest import hash_of, update_hash
from isokron.distributed import Ranks
from isokron.tasks import Examples, Shown
from isokron.training import Progress, silent

TOKENS = 2048  # in a batch
PIXELS = 32  # or other floating-point inputs, that take as long as a token
LARGEST_BATCH = 256  # examples
DEFAULT_BATCH = 8  # examples in a batch if their size is unknown
REPEATED = 8  # examples that are read again, to find random augmentation


class Data:
    """Examples that are read by index.

    Args:
        source: `isokron.tasks.Examples`, a map-style Dataset, a DataLoader (its data set and
            collate function, in the data set's order), a list of tuples or dicts, or a
            `datasets.Dataset`.
        collate: list of examples → batch; default: the DataLoader's, or torch's.
        batch_size: examples in a batch; default: the DataLoader's, or 2,048 tokens, or up to 256
            images or other vectors of numbers.
        lengths: tokens of every example, to batch examples of similar length.
        ids: a name for every example; default: its index.
        examples: use only this many examples, evenly spaced.
    """

    def __init__(
        self,
        source: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        lengths: Sequence[int] | None = None,
        ids: Sequence[str] = (),
        examples: int | None = None,
    ) -> None:
        if isinstance(source, DataLoader):
            collate = collate or source.collate_fn
            batch_size = batch_size or source.batch_size
            source = source.dataset
        # a dict of data sets, or a table of pandas, whose index is its columns
        if isinstance(source, Mapping) or hasattr(source, "iloc"):
            raise ValueError(
                f"train_set must be readable by index, got a {type(source).__name__} of "
                f"{', '.join(map(repr, list(source)[:6]))}; give one of its data sets, or a list "
                "of examples, as df.to_dict('records') of a DataFrame"
            )
        indexed = hasattr(source, "__getitem__") and not isinstance(source, IterableDataset)
        if not indexed and not isinstance(source, Examples):
            raise ValueError(
                "train_set must be readable by index (a map-style Dataset, a list, a DataLoader "
                f"over one), got {type(source).__name__}; make a list of it: list(data)"
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        total = len(source)
        if not total:
            raise ValueError("train_set must have at least one example, got none")
        ids = [str(name) for name in (ids if len(ids) else range(total))]
        if len(ids) != total or len(set(ids)) < total:
            raise ValueError(
                f"ids must be {total} different names, one per example, got {len(ids)} of which "
                f"{len(set(ids))} differ; leave them out to number the examples"
            )
        self.source, self.collate = source, collate or default_collate
        self.size, self.lengths, self.ids = batch_size, lengths, ids
        self.digest_of_all: str | None = None
        # maximum of a batch; the memory plan lowers it if memory is short
        self.tokens = TOKENS
        if examples is not None:
            if not 1 <= examples <= total:
                raise ValueError(
                    f"examples must be from 1 to the {total} training examples, got {examples}"
                )
            self._take_(spread(total, examples))

    def __len__(self) -> int:
        return len(self.source)

    def _take_(self, numbers: Sequence[int]) -> None:
        """Keep some of the examples."""
        lengths = self.lengths
        self.ids = [self.ids[number] for number in numbers]
        self.lengths = None if lengths is None else [lengths[number] for number in numbers]
        if isinstance(self.source, Examples):
            self.source = Examples(self.source.batch(torch.tensor(numbers)))
        else:
            self.source = Subset(self.source, numbers)

    def without(self, ids: Collection[str]) -> "Data":
        """The data without some examples; the digest stays that of all."""
        if not ids:
            return self
        numbers = [number for number, name in enumerate(self.ids) if name not in ids]
        if not numbers:
            raise FloatingPointError("no training example has a finite loss and gradient")
        others = copy(self)
        others.digest_of_all = self.digest()
        others.__dict__.pop("example", None)
        others._take_(numbers)
        return others

    def check_losses(self, numbers: Sequence[int], losses: Tensor) -> None:
        """Refuse losses of these examples that are not finite."""
        remedy = "mend it, or go on without such examples: on_bad='skip'"
        # terms of one dimension may be those of all positions
        equal, names = len(losses) == len(numbers), [self.ids[number] for number in numbers]
        some = f"one of the examples {', '.join(map(repr, names))}"
        refuse_nonfinite(losses, lambda row: f"example {names[row]!r}" if equal else some, remedy)

    def batch(self, numbers: Sequence[int]) -> Any:
        """These examples as one batch."""
        if isinstance(self.source, Examples):
            return self.source.batch(torch.tensor(list(numbers)))
        return self.collate([self.source[number] for number in numbers])

    def plan(self, numbers: Sequence[int] | None = None) -> list[list[int]]:
        """The indices of each batch; sorted by length if lengths are known, to reduce padding."""
        order = list(range(len(self)) if numbers is None else numbers)
        lengths = self.lengths
        if lengths is None:
            size = self.size or self._default_size()
            return [order[first : first + size] for first in range(0, len(order), size)]
        order.sort(key=lambda number: (lengths[number], number))
        batches: list[list[int]] = []
        for number in order:
            # the last example of a batch is the longest, and the others are padded to it
            last = batches[-1] if batches else []
            full = self.size is not None and len(last) >= self.size
            if not last or full or (len(last) + 1) * lengths[number] > self.tokens:
                batches.append([])
            batches[-1].append(number)
        return batches

    def _default_size(self) -> int:
        """Examples in a batch, judged by the first tensor of the first example."""
        example, equal = self.example, isinstance(self.source, Examples)
        first = example[0] if isinstance(example, tuple | list) and example else None
        if not isinstance(first, Tensor) or not (equal or first.is_floating_point()):
            return DEFAULT_BATCH
        tokens = first.numel() / (PIXELS if first.is_floating_point() else 1)
        return max(1, min(LARGEST_BATCH, int(self.tokens / max(1, tokens))))

    @cached_property
    def example(self) -> Any:
        """The first example."""
        if isinstance(self.source, Examples):
            return tuple(tensor[0] for tensor in self.source.tensors)
        return self.source[0]

    def longest(self) -> list[int]:
        """The batch that needs most memory."""
        lengths, batches = self.lengths, self.plan()
        if lengths is None:
            return batches[0]
        return max(batches, key=lambda batch: len(batch) * max(lengths[n] for n in batch))

    def digest(self) -> str:
        """A hash of the names and of all examples, since scores are stored by index."""
        if self.digest_of_all is not None:
            return self.digest_of_all
        if isinstance(self.source, Examples):
            return hash_of([self.ids, self.source.tensors])[:16]
        total = hashlib.sha256()
        update_hash(total, self.ids)
        for number in range(len(self)):
            update_hash(total, self._example_hash(number))
        self._check_repeatable()
        return total.hexdigest()[:16]

    def _example_hash(self, number: int) -> str:
        try:
            return hash_of(self.source[number])
        except TypeError as error:
            raise TypeError(f"example {self.ids[number]!r} of train_set: {error}") from None

    def _check_repeatable(self) -> None:
        """Refuse data that differ when they are read again, as by random augmentation."""
        few = spread(len(self), min(REPEATED, len(self)))
        twice = ([self._example_hash(number) for number in few] for _ in range(2))
        changed = [number for number, a, b in zip(few, *twice, strict=True) if a != b]
        if not changed:
            # a batch may be of a class without a digest; the loss is compared anyway
            with suppress(TypeError):
                batches = (hash_of(self.batch(few[:1])) for _ in range(2))
                changed = few[:1] if len(set(batches)) > 1 else []
        if changed:
            raise ValueError(
                "train_set must give the same example whenever it is read, and example "
                f"{self.ids[changed[0]]!r} differs the second time, as by random augmentation; "
                "make the data set and collate deterministic in the index"
            )


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained model with its layers, loss and training data."""

    model: nn.Module
    layers: list[Layer]
    loss: Loss | Likelihood
    data: Data
    device: torch.device
    ranks: Ranks | None = None
    progress: Progress = silent

    def batch(self, numbers: Sequence[int]) -> Any:
        """Training examples on the model's device."""
        return to_device(self.data.batch(numbers), self.device)

    def batches(self, plan: list[list[int]], stage: str | None = None) -> "Batches":
        """The batches of a plan. stage: name under which progress is shown."""
        return Batches(self, plan, stage)


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of training examples on a device; can be iterated any number of times."""

    subject: Subject
    numbers: list[list[int]]
    stage: str | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def check_losses(self, number: int, losses: Tensor) -> None:
        """Called in a pass with the losses of a batch; refuses those that are not finite."""
        self.subject.data.check_losses(self.numbers[number], losses)

    def __getitem__(self, part: slice) -> "Batches":
        return Batches(self.subject, self.numbers[part], self.stage)

    def __iter__(self) -> Iterator[Any]:
        progress = silent if self.stage is None else self.subject.progress
        done, total = 0, sum(map(len, self.numbers))
        progress(self.stage or "", 0, total)
        for numbers in self.numbers:
            yield self.subject.batch(numbers)
            done += len(numbers)
            progress(self.stage or "", done, total)


def spread(total: int, count: int) -> list[int]:
    """Indices of `count` of `total` examples, evenly spaced."""
    return [number * total // count for number in range(count)]


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors on the device."""
    # transformers' BatchEncoding has a `to` method; other mappings may be of any class
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    return tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, batch)


def size_of(batch: Any) -> int:
    """Number of elements, such as tokens, of the largest tensor of a batch."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return max([1, *(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))])


def show_example(batch: Any) -> Shown:
    """The text, image and label of a batch of one example, for data without a `show` function."""
    if not isinstance(batch, Mapping):
        batch = dict(enumerate(batch if isinstance(batch, tuple | list) else [batch]))
    values = {
        key: value[0]
        for key, value in batch.items()
        if (isinstance(value, tuple | list) or (isinstance(value, Tensor) and value.ndim))
        and len(value) == 1
    }
    texts = [value for value in values.values() if isinstance(value, str)]
    images = [image for value in values.values() if (image := _image(value)) is not None]
    # of a pair (input, label), the second
    label = values.get("label", values.get("labels", values.get(1)))
    label = label.item() if isinstance(label, Tensor) and label.ndim == 0 else label
    return Shown(
        # the loss has no terms by which a text could be cut into tokens
        context="".join(texts[:1]),
        image=images[0] if images else None,
        label=str(int(label)) if isinstance(label, int) else "",
    )


def _image(value: Any) -> Tensor | None:
    """A floating-point image as uint8 [h, w] or [h, w, 3], scaled to its range."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.ndim == 3 and value.size(0) in (1, 3):
        value = value[0] if value.size(0) == 1 else value.movedim(0, -1)
    if value.ndim != 2 and value.shape[2:] != (3,):
        return None
    value = value.detach().cpu().float()
    low, high = value.min(), value.max()
    return ((value - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
