"""One training run: a task, an optimizer, a learning rate and a seed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from isokron.race.optimizers import Entrant
from isokron.race.results import Run
from isokron.race.schedule import batch_order, digest, evaluation_steps, warmup_cosine
from isokron.tasks.task import Task

FAR_ABOVE = 10.0  # times the evaluation loss at the start: no run comes back from there
UNTIMED = 3  # first steps, which pay for allocation and warm-up
EVALUATION_BATCH = 128


class Failed(Exception):
    """The optimizer itself raised."""


@dataclass
class Record:
    """Measurements of a run under way."""

    eval_steps: list[int] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)
    model_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)


def train(
    task: Task,
    entrant: Entrant,
    lr: float,
    seed: int,
    steps: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Run:
    """Train once. Weights and batches depend on the seed only, never on the optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
        order = batch_order(len(task.train), task.batch_size, steps, seed)
        weights, batches = digest(model.state_dict().values()), digest([order])
        record, state_bytes = Record(), 0
        status, message, sample = "finished", "", ""
        try:
            optimizer = _optimizer(entrant, model, lr)
            torch.manual_seed(seed)  # what building the optimizer drew must not shift dropout
            _loop(task, model, optimizer, order, record, on_step)
            state_bytes = optimizer_bytes(optimizer)
            if task.sample is not None and seed == 0:
                sample = task.sample(model.eval())
        except FloatingPointError as error:
            status, message = "diverged", str(error)
        except Failed as error:
            status, message = "failed", str(error)
    return Run(
        entrant.spec,
        lr,
        seed,
        status,
        message,
        tuple(record.eval_steps),
        tuple(record.eval_losses),
        tuple(record.train_losses),
        # some steps of an optimizer do what the others are spared: its median would hide them
        _per_step(record.model_seconds, statistics.median),
        _per_step(record.optimizer_seconds, statistics.mean),
        state_bytes,
        weights,
        batches,
        sample,
    )


def _loop(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    order: Tensor,
    record: Record,
    on_step: Callable[[int, float], None],
) -> None:
    steps = len(order)
    schedule = _guarded(LambdaLR, optimizer, lambda step: warmup_cosine(step, steps))
    evaluations = set(evaluation_steps(steps))
    _evaluate(task, model, 0, record)
    model.train()
    for step, indices in enumerate(order, start=1):
        batch = task.train.batch(indices)
        optimizer.zero_grad()
        start = _now(model)
        loss = task.losses(model, batch).mean()
        loss.backward()
        between = _now(model)
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"training loss became {value} at step {step}")
        ready = _now(model)
        _guarded(optimizer.step)
        end = _now(model)
        _guarded(schedule.step)
        record.train_losses.append(value)
        record.model_seconds.append(between - start)
        record.optimizer_seconds.append(end - ready)
        on_step(step, value)
        if step in evaluations:
            _switch(optimizer, "eval")
            _evaluate(task, model, step, record)
            if step < steps:
                _switch(optimizer, "train")
                model.train()


@torch.no_grad()
def _evaluate(task: Task, model: nn.Module, step: int, record: Record) -> None:
    model.eval()
    indices = torch.arange(len(task.evaluation))
    parts = [
        task.losses(model, task.evaluation.batch(part)) for part in indices.split(EVALUATION_BATCH)
    ]
    loss = torch.cat(parts).double().mean().item()
    if not math.isfinite(loss):
        raise FloatingPointError(f"evaluation loss became {loss} at step {step}")
    record.eval_steps.append(step)
    record.eval_losses.append(loss)
    start = record.eval_losses[0]
    if loss - start > FAR_ABOVE * abs(start):
        raise FloatingPointError(
            f"evaluation loss rose from {start:.4g} to {loss:.4g} by step {step}"
        )


def _optimizer(entrant: Entrant, model: nn.Module, lr: float) -> Optimizer:
    optimizer = _guarded(entrant.build, model, lr)
    if not isinstance(optimizer, Optimizer):
        raise Failed(f"built a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call into the optimizer; its errors are its own, a non-finite number is divergence."""
    try:
        return function(*arguments)
    except FloatingPointError:
        raise
    except Exception as error:
        raise Failed(f"{type(error).__name__}: {error}") from error


def _switch(optimizer: Optimizer, mode: str) -> None:
    """Optimizers that average iterates evaluate elsewhere than they take gradients."""
    switch = getattr(optimizer, mode, None)
    if switch is not None:
        _guarded(switch)


def _now(model: nn.Module) -> float:
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type != "cpu":
        torch.accelerator.synchronize()  # queued work belongs to the phase that queued it
    return time.perf_counter()


def _per_step(seconds: list[float], typical: Callable[[list[float]], float]) -> float:
    timed = seconds[UNTIMED:] or seconds
    return typical(timed) if timed else 0.0


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes of all state tensors, each storage counted once."""
    storages = {}
    for tensor in _tensors(optimizer.state):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
