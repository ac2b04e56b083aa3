"""What is explained: a trained model, the examples it was trained on, and its loss."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.storage.ragged import Display
from isokron.curvature import CrossEntropy
from isokron.curvature.likelihoods import Likelihood, Loss
from isokron.curvature.sites import Site, find_sites
from isokron.tasks import Examples, Shown, Task

PASS = 2048  # numbers, such as tokens, of which examples go through the model at once


@dataclass(frozen=True, eq=False)
class Subject:
    """A task with its trained model. `layers`: patterns of names, none for all that are known."""

    task: Task
    model: nn.Module
    layers: tuple[str, ...] = ()
    examples: int | None = None  # how many of the training examples, evenly spread; None: all

    def __post_init__(self) -> None:
        most = len(self.task.train)
        if self.examples is not None and not 1 <= self.examples <= most:
            raise ValueError(
                f"examples must be from 1 to the {most} training examples, got {self.examples}"
            )

    @property
    def loss(self) -> Loss | Likelihood:
        """One term a prediction where the task has logits, else one an example."""
        return self.task.losses if self.task.logits is None else CrossEntropy(self.task.logits)

    @cached_property
    def sites(self) -> list[Site]:
        return find_sites(self.model, self.layers or None)

    @cached_property
    def train(self) -> Examples:
        if self.examples is None:
            return self.task.train
        return Examples(self.task.train.batch(spread(len(self.task.train), self.examples)))

    @cached_property
    def ids(self) -> Sequence[str]:
        if self.examples is None or not self.task.ids:
            return self.task.ids
        numbers = spread(len(self.task.train), self.examples).tolist()
        return [self.task.ids[number] for number in numbers]

    @property
    def batch_size(self) -> int:
        """Of passes over the data: where examples are small, larger than that of training."""
        least = self.task.batch_size
        return max(least, min(len(self.train), PASS // max(1, self.train.tensors[0][0].numel())))

    def batches(self) -> Iterator[Any]:
        """The training examples in their order."""
        return iter(self.counted(lambda done, total: None))

    def counted(self, progress: Callable[[int, int], None], count: int | None = None) -> "Counted":
        """Batches of the training examples in their order, any number of times, with the progress
        of each; of `count` of them, evenly spread, or of all."""
        total = len(self.train)
        return Counted(
            self, torch.arange(total) if count is None else spread(total, count), progress
        )

    def show(self) -> Callable[[Any], list[Display]] | None:
        """What a store keeps for people, of a batch."""
        shown = self.task.show
        if shown is None:
            return None
        return lambda batch: [display(each) for each in shown(batch)]

    def digests(self) -> dict[str, str]:
        """Of all weights, and of the training examples."""
        weights = sorted(self.model.state_dict().items())
        return {
            "weights": _digest([tensor for _, tensor in weights]),
            "data": _digest(self.train.tensors),
        }


def spread(total: int, count: int) -> Tensor:
    """Numbers of `count` examples, evenly spread over all of them."""
    return torch.arange(count) * total // count


class Counted:
    """Batches of a subject's training examples, to be gone over any number of times. `of`: of how
    many examples these are a share, whose progress stands for that of all."""

    def __init__(
        self,
        subject: Subject,
        numbers: Tensor,
        progress: Callable[[int, int], None],
        of: int | None = None,
    ) -> None:
        self.subject, self.numbers, self.progress = subject, numbers, progress
        self.of = len(numbers) if of is None else of

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.subject.batch_size)

    def __getitem__(self, some: slice) -> "Counted":
        """Some of the batches, which are the same as among all."""
        first, last, _ = some.indices(len(self))
        size = self.subject.batch_size
        return Counted(
            self.subject, self.numbers[first * size : last * size], self.progress, self.of
        )

    def __iter__(self) -> Iterator[Any]:
        done, total = 0, len(self.numbers)
        self.progress(0, self.of)
        for some in self.numbers.split(self.subject.batch_size) if total else ():
            yield self.subject.train.batch(some)
            done += len(some)
            self.progress(done * self.of // total, self.of)
        if not total:
            self.progress(self.of, self.of)


def display(shown: Shown) -> Display:
    """As a store keeps it."""
    return Display("shown", json.dumps(shown.to_json(), ensure_ascii=False).encode())


def shown_of(subject: Subject, example: int) -> Shown:
    """What a person sees of a training example: its name, where the task says no more."""
    show = subject.task.show
    if show is not None:
        return show(subject.train.batch(torch.tensor([example])))[0]
    return Shown(title=subject.ids[example] if subject.ids else str(example))


def _digest(tensors: Sequence[Tensor]) -> str:
    """Of dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
