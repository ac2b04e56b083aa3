"""Train a task's model, or load its weights."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import isokron
from isokron.digest import class_code, hash_of
from isokron.files import write_atomically
from isokron.tasks import Task


class Progress(Protocol):
    """Called with the stage, the units done, their number (0: a message only) and a note."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """No progress display."""


def warmup_cosine(step: int, steps: int, warmup: float = 0.1) -> float:
    """Factor on the learning rate: linear over the share `warmup`, then half a cosine to 0."""
    # step 0 counts as 1, since a learning rate of 0 would waste it
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def batch_order(examples: int, batch_size: int, steps: int, seed: int) -> Tensor:
    """Example indices of every step, [steps, batch_size], from a permutation per epoch."""
    generator = torch.Generator().manual_seed(seed)
    # incomplete last batches are dropped
    used = examples - examples % batch_size
    epochs = range(math.ceil(steps * batch_size / used))
    order = torch.cat([torch.randperm(examples, generator=generator)[:used] for _ in epochs])
    return order.view(-1, batch_size)[:steps]


def digest(tensors: Iterable[Tensor]) -> str:
    """The first sixteen hex digits of the SHA-256 of all bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def task_digest(task: Task) -> str:
    """A hash of what a task's model is trained on: data, code of model and loss, batch size."""
    return hash_of((class_code(task.model), task.loss, task.batch_size, task.train.tensors))[:16]


def make_model(task: Task, seed: int) -> nn.Module:
    """A new model with the initial weights of a race with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()


@torch.no_grad()
def evaluation_loss(model: nn.Module, task: Task) -> float:
    """Mean loss over the evaluation examples, in evaluation mode."""
    model.eval()
    batches = torch.arange(len(task.held_out)).split(128)
    losses = [task.losses(model, task.held_out.batch(indices)) for indices in batches]
    return torch.cat(losses).double().mean().item()


def make_optimizer(model: nn.Module, lr: float) -> Optimizer:
    """The optimizer of `train_`."""
    return isokron.AdamW(isokron.param_groups(model), lr=lr)


def train_(
    model: nn.Module,
    task: Task,
    steps: int,
    lr: float,
    seed: int,
    progress: Progress = silent,
    examples: Tensor | Sequence[int] | None = None,
    optimizer: Optimizer | None = None,
) -> None:
    """Train the model.

    examples: indices of the training examples to use; default: all. optimizer: default: AdamW.
    """
    numbers = torch.as_tensor(range(len(task.train)) if examples is None else examples)
    optimizer = optimizer or make_optimizer(model, lr)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    model.train()
    with torch.random.fork_rng(devices=[]):
        # dropout must not depend on the optimizer's constructor
        torch.manual_seed(seed)
        batches = batch_order(len(numbers), min(task.batch_size, len(numbers)), steps, seed)
        for step, indices in enumerate(batches, start=1):
            loss = task.losses(model, task.train.batch(numbers[indices])).mean()
            loss.backward()
            if not math.isfinite(value := loss.item()):
                raise ValueError(f"training loss became {value} at step {step}; lower lr={lr:g}")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress("training", step, steps, f"loss {value:.4g}")


def save_weights(model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file, as a whole; tensors that share memory are written once."""
    tensors: dict[tuple[object, ...], tuple[str, Tensor]] = {}
    for name, value in model.state_dict().items():
        place = (value.data_ptr(), value.shape, value.stride()) if value.numel() else (name,)
        tensors.setdefault(place, (name, value.detach().cpu().contiguous()))
    write_atomically(path, [save(dict(tensors.values()), metadata)])


def load_weights_(model: nn.Module, path: Path) -> None:
    """Set all parameters and buffers from a safetensors file."""
    remedy = "write them with safetensors.torch.save_model(model, path)"
    if not path.is_file():
        raise ValueError(
            f"weights must be a safetensors file, and there is no file {str(path)!r}; paths are "
            f"relative to {Path.cwd()}; {remedy}"
        )
    try:
        load_model(model, path)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"weights {path.name!r} do not fit: {error}; {remedy}") from None
    for name, value in model.state_dict().items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"weights {path.name!r} are damaged: {name!r} is not finite")
