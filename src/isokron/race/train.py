"""One training run: a task, an optimizer, a setting and a seed."""

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
from isokron.race.search import Setting
from isokron.tasks import Task
from isokron.training import batch_order, digest, evaluation_loss, warmup_cosine

EVALUATIONS, FEW_EVALUATIONS = 25, 5  # of runs with all steps, and of shorter ones
FAR_ABOVE = 10.0  # a rise by this multiple of the initial evaluation loss is divergence
UNTIMED = 3  # first steps, which include allocation and warm-up

OnStep = Callable[[int, float], None]  # called with every step but the last and its training loss


class Failed(Exception):
    """The optimizer raised an error."""


def evaluation_steps(steps: int, evaluations: int = EVALUATIONS) -> list[int]:
    """Evenly spaced step counts, from 0 (untrained) to `steps`."""
    count = min(steps, evaluations - 1)
    return sorted({round(i * steps / count) for i in range(count + 1)})


def train(
    task: Task,
    entrant: Entrant,
    setting: Setting | float,
    seed: int,
    steps: int,
    on_step: OnStep = lambda step, loss: None,
    warmup: float = 0.1,
    evaluations: int = EVALUATIONS,
) -> Run:
    """Train once. Weights and batches depend on the seed, not on the optimizer.

    setting: a number is a learning rate for all parameters.
    """
    if not isinstance(setting, Setting):
        setting = Setting(entrant.spec, setting)
    tuned = (setting.ratio, setting.decay, setting.beta2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.model()
        order = batch_order(len(task.train), task.batch_size, steps, seed)
        weights, batches = digest(model.state_dict().values()), digest([order])
        run = Run(entrant.spec, setting.lr, seed, steps, *tuned, weights=weights, batches=batches)
        try:
            optimizer = _guarded(entrant.build, model, setting.lr, **setting.options)
            torch.manual_seed(seed)  # dropout must not depend on the optimizer's constructor
            evaluated = evaluation_steps(steps, evaluations)
            _train_(run, task, model, optimizer, order, evaluated, on_step, warmup)
            run.optimizer_bytes = optimizer_bytes(optimizer)
            if task.sample is not None and seed == 0:
                run.sample = task.sample(model.eval())
        except FloatingPointError as error:
            run.status, run.message = "diverged", str(error)
        except Failed as error:
            run.status, run.message = "failed", str(error)
    return run


def _train_(
    run: Run,
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    order: Tensor,
    evaluated: list[int],
    on_step: OnStep,
    warmup: float,
) -> None:
    """Train on these batches, recording losses and times in the run."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())

    def now() -> float:
        if not on_cpu:
            torch.accelerator.synchronize()  # queued work counts in the phase that queued it
        return time.perf_counter()

    model_seconds, optimizer_seconds = [], []
    schedule = _guarded(LambdaLR, optimizer, lambda step: warmup_cosine(step, len(order), warmup))
    _evaluate(run, task, model, 0)
    for step, indices in enumerate(order, start=1):
        model.train()
        # optimizers that average iterates have other weights in evaluation
        _guarded(getattr(optimizer, "train", lambda: None))
        batch = task.train.batch(indices)
        optimizer.zero_grad()
        start = now()
        loss = task.losses(model, batch).mean()
        loss.backward()
        if not math.isfinite(value := loss.item()):
            raise FloatingPointError(f"training loss became {value} at step {step}")
        if step == len(order):  # the first call turns on recording, here of the last step only
            run.statistics = _guarded(getattr(optimizer, "statistics", list))
        between = now()
        _guarded(optimizer.step)
        model_seconds.append(between - start)
        optimizer_seconds.append(now() - between)
        _guarded(schedule.step)
        run.train_losses.append(value)
        if step in evaluated:
            _guarded(getattr(optimizer, "eval", lambda: None))
            _evaluate(run, task, model, step)
        if step < len(order):
            on_step(step, value)
    if run.statistics:
        run.statistics = _guarded(optimizer.statistics)  # type: ignore[attr-defined]
    run.model_seconds = statistics.median(model_seconds[UNTIMED:] or model_seconds)
    # the mean, since a median would hide steps that refresh a preconditioner
    run.optimizer_seconds = statistics.mean(optimizer_seconds[UNTIMED:] or optimizer_seconds)


def _evaluate(run: Run, task: Task, model: nn.Module, step: int) -> None:
    loss = evaluation_loss(model, task)
    if not math.isfinite(loss):
        raise FloatingPointError(f"evaluation loss became {loss} at step {step}")
    run.eval_steps.append(step)
    run.eval_losses.append(loss)
    first = run.eval_losses[0]
    if loss - first > FAR_ABOVE * abs(first):
        rise = f"from {first:.4g} to {loss:.4g} by step {step}"
        raise FloatingPointError(f"evaluation loss rose {rise}")


def _guarded(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the optimizer; its errors become `Failed`, except FloatingPointError (divergence)."""
    try:
        return function(*arguments, **options)
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
