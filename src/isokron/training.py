"""Train a task's model as a race does, and keep its weights in safetensors files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from isokron.files import write_atomically
from isokron.tasks import Task

WARMUP = 0.1  # of all steps
EVALUATION_BATCH = 128


class Progress(Protocol):
    """A function told what runs, how many units are done, of how many. total 0: a message only."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """No progress display."""


def warmup_cosine(step: int, steps: int) -> float:
    """Factor on the learning rate: linear over the first tenth, then half a cosine to 0."""
    # the first step has a rate above 0: it would be wasted
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def batch_order(examples: int, batch_size: int, steps: int, seed: int) -> Tensor:
    """Example indices of every step, [steps, batch_size]: epoch after epoch of permutations."""
    generator = torch.Generator().manual_seed(seed)
    per_epoch = examples // batch_size
    epochs = [
        torch.randperm(examples, generator=generator)[: per_epoch * batch_size]
        for _ in range(-(-steps // per_epoch))
    ]
    return torch.cat(epochs).view(-1, batch_size)[:steps]


def digest(tensors: Iterable[Tensor]) -> str:
    """The first sixteen hex digits of the SHA-256 of all bytes, to compare tensors of two runs."""
    sha = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def make_model(task: Task, seed: int) -> nn.Module:
    """A new model with the weights that a race gives it for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()


@torch.no_grad()
def evaluation_loss(model: nn.Module, task: Task) -> float:
    """Mean loss over the evaluation examples, in evaluation mode."""
    model.eval()
    parts = torch.arange(len(task.held_out)).split(EVALUATION_BATCH)
    losses = [task.losses(model, task.held_out.batch(part)) for part in parts]
    return torch.cat(losses).double().mean().item()


def train_(
    model: nn.Module,
    task: Task,
    steps: int,
    lr: float,
    seed: int,
    progress: Progress = silent,
    only: Tensor | Sequence[int] | None = None,
) -> None:
    """Train with AdamW on the training examples `only`, or on all of them."""
    import isokron

    numbers = torch.as_tensor(range(len(task.train)) if only is None else only)
    optimizer = isokron.AdamW(isokron.param_groups(model), lr=lr)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    model.train()
    with torch.random.fork_rng(devices=[]):
        # what building the optimizer drew must not shift dropout
        torch.manual_seed(seed)
        batches = batch_order(len(numbers), min(task.batch_size, len(numbers)), steps, seed)
        for step, indices in enumerate(batches, start=1):
            optimizer.zero_grad()
            loss = task.losses(model, task.train.batch(numbers[indices])).mean()
            loss.backward()
            if not math.isfinite(value := loss.item()):
                raise ValueError(f"training loss became {value} at step {step}; lower lr={lr:g}")
            optimizer.step()
            schedule.step()
            progress("training", step, steps, f"loss {value:.4g}")
    optimizer.zero_grad()


def load_weights_(model: nn.Module, path: Path) -> None:
    """Set all parameters and buffers from a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    if not path.is_file():
        raise ValueError(f"weights: no file {str(path)!r}; paths are relative to {Path.cwd()}")
    try:
        load_model(model, path)
    except (SafetensorError, OSError, RuntimeError) as error:
        remedy = "write them with safetensors.torch.save_model(model, path)"
        raise ValueError(f"weights {path.name!r} do not fit: {error}; {remedy}") from None
    for name, value in model.state_dict().items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"weights {path.name!r} are damaged: {name!r} is not finite")


def save_weights(model: nn.Module, path: Path, note: str) -> None:
    """Write all parameters and buffers atomically, with a note on how they came about."""
    from safetensors.torch import save

    by_place: dict[int, tuple[str, Tensor]] = {}
    # safetensors refuses tensors that share memory: the first name stands for all
    for name, tensor in model.state_dict().items():
        by_place.setdefault(tensor.data_ptr() or id(tensor), (name, tensor))
    tensors = {name: tensor.contiguous() for name, tensor in by_place.values()}
    write_atomically(path, [save(tensors, {"note": note})])


def note_of(path: Path) -> str | None:
    """The note in a weights file; None if there is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("note")
    except (SafetensorError, OSError):
        return None
