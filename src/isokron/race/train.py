"""One training run: a task, an optimizer, a learning rate and a seed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from isokron.optimizers_by_name import Entrant
from isokron.race.results import Run
from isokron.tasks import Task
from isokron.training import batch_order, digest, evaluation_loss, warmup_cosine

EVALUATIONS = 25
FAR_ABOVE = 10.0  # times the evaluation loss at the start: no run comes back from there
UNTIMED = 3  # first steps, which pay for allocation and warm-up

OnStep = Callable[[int, float], None]  # told the step and its training loss


class Failed(Exception):
    """The optimizer itself raised."""


def evaluation_steps(steps: int) -> list[int]:
    """About 25 evenly spaced step counts, from 0 (untrained) to `steps`."""
    count = min(steps, EVALUATIONS - 1)
    return sorted({round(i * steps / count) for i in range(count + 1)})


def train(
    task: Task,
    entrant: Entrant,
    lr: float,
    seed: int,
    steps: int,
    on_step: OnStep = lambda step, loss: None,
) -> Run:
    """Train once. Weights and batches depend on the seed only, never on the optimizer."""
    evaluations: dict[int, float] = {}  # step → loss
    records: list[tuple[float, float, float]] = []  # loss, seconds of model and optimizer
    status, message, sample, state_bytes = "finished", "", "", 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
        order = batch_order(len(task.train), task.batch_size, steps, seed)
        weights, batches = digest(model.state_dict().values()), digest([order])
        try:
            optimizer = _guarded(entrant.build, model, lr)
            if not isinstance(optimizer, Optimizer):
                raise Failed(f"built a {type(optimizer).__name__}, not a torch.optim.Optimizer")
            torch.manual_seed(seed)  # what building the optimizer drew must not shift dropout
            for record in _steps(task, model, optimizer, order, evaluations):
                records.append(record)
                on_step(len(records), record[0])
            state_bytes = optimizer_bytes(optimizer)
            if task.sample is not None and seed == 0:
                sample = task.sample(model.eval())
        except FloatingPointError as error:
            status, message = "diverged", str(error)
        except Failed as error:
            status, message = "failed", str(error)
    losses, *seconds = zip(*records, strict=True) if records else ((), (), ())
    model_seconds, optimizer_seconds = (part[UNTIMED:] or part or (0.0,) for part in seconds)
    # some steps of an optimizer do what the others are spared: its median would hide them
    times = (statistics.median(model_seconds), statistics.mean(optimizer_seconds))
    curve = (tuple(evaluations), tuple(evaluations.values()), losses)
    digests = (weights, batches)
    return Run(
        entrant.spec, lr, seed, status, message, *curve, *times, state_bytes, *digests, sample
    )


def _steps(
    task: Task, model: nn.Module, optimizer: Optimizer, order: Tensor, evaluations: dict[int, float]
) -> Iterator[tuple[float, float, float]]:
    """The loss of every step, and the seconds of the model and of the optimizer."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())

    def now() -> float:
        if not on_cpu:
            torch.accelerator.synchronize()  # queued work belongs to the phase that queued it
        return time.perf_counter()

    evaluated = evaluation_steps(len(order))
    schedule = _guarded(LambdaLR, optimizer, lambda step: warmup_cosine(step, len(order)))
    _evaluate(task, model, 0, evaluations)
    for step, indices in enumerate(order, start=1):
        model.train()
        batch = task.train.batch(indices)
        optimizer.zero_grad()
        start = now()
        loss = task.losses(model, batch).mean()
        loss.backward()
        between = now()
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"training loss became {value} at step {step}")
        ready = now()
        _guarded(optimizer.step)
        end = now()
        _guarded(schedule.step)
        yield value, between - start, end - ready
        if step in evaluated:
            # optimizers that average iterates evaluate at other weights than they train
            _guarded(getattr(optimizer, "eval", lambda: None))
            _evaluate(task, model, step, evaluations)
            if step < len(order):
                _guarded(getattr(optimizer, "train", lambda: None))


def _evaluate(task: Task, model: nn.Module, step: int, evaluations: dict[int, float]) -> None:
    loss = evaluation_loss(model, task)
    if not math.isfinite(loss):
        raise FloatingPointError(f"evaluation loss became {loss} at step {step}")
    evaluations[step] = loss
    if loss - evaluations[0] > FAR_ABOVE * abs(evaluations[0]):
        rose = f"evaluation loss rose from {evaluations[0]:.4g} to {loss:.4g} by step {step}"
        raise FloatingPointError(rose)


def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call into the optimizer: its errors are its failure, a non-finite number is divergence."""
    try:
        return function(*arguments)
    except FloatingPointError:
        raise
    except Exception as error:
        raise Failed(f"{type(error).__name__}: {error}") from error


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes of all state tensors, each storage counted once."""
    storages = [tensor.untyped_storage() for tensor in _tensors(optimizer.state)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
