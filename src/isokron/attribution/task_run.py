"""Training runs of tasks as functions of example weights, and scores by their derivatives."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from isokron.attribution.data import Subject, to_device
from isokron.attribution.queries import Query
from isokron.attribution.scorers import ExactScorer, Scored, positions
from isokron.attribution.unroll import TrainingRun
from isokron.curvature import Curvature
from isokron.curvature.backward import unchanged
from isokron.curvature.losses import losses_of
from isokron.curvature.selection import Selection
from isokron.optim.functional_step import FunctionalStep
from isokron.tasks import Batch, Task
from isokron.training import Progress, batch_order, silent, warmup_cosine

TOLERANCE = 0.01  # distance between the run's end and the model, relative to that of its start


class _Bound(nn.Module):
    """A function of a model and a batch, as a module that `functional_call` takes."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, batch: Any) -> Tensor:
        return self.function(self.model, batch)

    def at(self, params: Mapping[str, Tensor], batch: Any) -> Tensor:
        weights = {f"model.{name}": param for name, param in params.items()}
        losses: Tensor = functional_call(self, weights, (batch,))
        return losses


def task_run(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    steps: int,
    seed: int,
    *,
    examples: Tensor | Sequence[int] | None = None,
    warmup: float = 0.1,
    progress: Progress = silent,
) -> TrainingRun:
    """The run of `isokron.training.train_`, or of a race, as a function of example weights.

    Neither the model nor the optimizer is changed. Dropout is exact: the generator's state is part
    of the run's. The eigenbases of SOAP are constants.

    Args:
        task: the training examples and their loss.
        model: with its initial weights.
        optimizer: new, of the model's parameters, with the peak learning rate.
        steps: number of steps.
        seed: of batches and dropout.
        examples: indices of the training examples to use; default: all.
        warmup: share of the steps in which the learning rate rises.
        progress: called with the stage, the steps done and their number.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    # steps set the mode of the model, and count in the optimizer's state
    model, optimizer = deepcopy((model, optimizer))
    numbers = torch.as_tensor(range(len(task.train)) if examples is None else examples)
    device = next(model.parameters()).device
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    has_stepped = bool(optimizer.state)
    functional, bound = FunctionalStep(optimizer, trained), _Bound(model, task.losses)
    if has_stepped:
        raise ValueError(
            "optimizer must be new, got one that has made steps; make it again with the model's "
            "initial weights"
        )

    def batch(indices: Tensor) -> Batch:
        moved: Batch = to_device(task.train.batch(numbers[indices]), device)
        return moved

    def step(params: Any, state: Any, batch: Batch, weights: Tensor) -> tuple[Any, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state["generator"])
            model.train()
            # fused attention has no second derivative
            with sdpa_kernel(SDPBackend.MATH):
                losses = bound.at(params, batch)
            generator = torch.get_rng_state()
        recorded, done = weights.requires_grad, int(state["step"])
        loss = (weights * losses).sum() / len(losses)
        slopes = torch.autograd.grad(
            loss, list(params.values()), create_graph=recorded, allow_unused=True
        )
        grads = dict(zip(params, slopes, strict=True))
        for name, grad in grads.items():
            if grad is None:
                raise ValueError(
                    f"parameter {name!r} has no gradient in step {done + 1}, so that the optimizer "
                    "leaves it as it is; freeze it (requires_grad_(False)) to unroll the run"
                )
        scale = warmup_cosine(done, steps, warmup)
        with torch.set_grad_enabled(recorded):
            params, moments = functional(params, state["optimizer"], grads, done + 1, scale)
        return params, {"optimizer": moments, "generator": generator, "step": state["step"] + 1}

    order = batch_order(len(numbers), min(task.batch_size, len(numbers)), steps, seed)
    refuse_buffers(bound, batch(order[0]))
    params = {name: param.detach().clone() for name, param in trained.items()}
    generator = torch.Generator().manual_seed(seed).get_state()
    state = {"optimizer": functional.initial_state(params), "generator": generator}
    state["step"] = torch.tensor(0)
    # one step shows whether all can be made, before the model is trained
    with torch.enable_grad():
        trial = {name: param.clone().requires_grad_() for name, param in params.items()}
        step(trial, state, batch(order[0]), torch.ones(len(order[0]), device=device))
    return TrainingRun(step, params, state, batch, list(order), len(numbers), progress)


def refuse_buffers(bound: _Bound, batch: Batch) -> None:
    """Refuse a model whose forward pass in training changes its buffers, as BatchNorm does."""
    before = {name: buffer.clone() for name, buffer in bound.model.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        bound.model.train()
        bound(batch)
    for name, buffer in bound.model.named_buffers():
        changed = not torch.equal(buffer, before[name])
        buffer.copy_(before[name])
        if changed:
            raise ValueError(
                f"buffer {name!r} changes in training (as in BatchNorm), and no derivative goes "
                "through it; use a norm without running statistics, such as GroupNorm"
            )


@dataclass(frozen=True, eq=False)
class UnrolledScorer(ExactScorer):
    """Scores of a model's training examples by the training run that made it."""

    task: Task
    run: TrainingRun
    memory: int

    @classmethod
    def checked(
        cls,
        subject: Subject,
        inverse: Callable[[float], Curvature | None],
        task: Task | None,
        run: TrainingRun | None,
        memory: int,
    ) -> "UnrolledScorer":
        if task is None or run is None or subject.ranks is not None:
            raise ValueError(
                "method 'unroll' needs a task, one process, and the training run of the model; "
                "give run=isokron.attribution.task_run.task_run(task, model, optimizer, …)"
            )
        if not isinstance(run, TrainingRun):
            raise ValueError(f"run must be a TrainingRun, got {type(run).__name__}")
        names = dict(subject.model.named_parameters())
        shapes = {name: tuple(param.shape) for name, param in run.params.items()}
        if any(name not in names or names[name].shape != s for name, s in shapes.items()):
            raise ValueError(
                "run must be that of the attributor's model, got one of a model with other "
                "parameters"
            )
        if run.examples != len(subject.data):
            raise ValueError(
                f"run must have the {len(subject.data)} training examples of the attributor, got "
                f"{run.examples}; give both the same examples"
            )
        return cls(subject, inverse, task, run, memory)

    def settled(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Without damping; refuse it, refinement and a store."""
        for argument in ("damping", "refine", "store"):
            if (value := settings.get(argument)) not in (None, 0):
                raise ValueError(
                    f"{argument} has no meaning for an unrolled run, got {value!r}; leave it out"
                )
        return {**settings, "damping": None}

    def scores(
        self,
        queries: Sequence[Query],
        damping: float,
        *,
        block: int,
        mean: bool = False,
        by_layer: bool = False,
        unit: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> Scored:
        """Scores of all examples, in nats. block: queries of one unrolled run."""
        if by_layer or unit:
            name = "by_layer" if by_layer else "unit"
            raise ValueError(f"{name} must be False for an unrolled run: it has no gradients")
        batches, bound = self._batches_of(queries), _Bound(self.subject.model, self._losses)

        def losses(asked: Sequence[Any], params: Mapping[str, Tensor]) -> Tensor:
            self._check_model(params)
            values = torch.stack([bound.at(params, batch).sum() for batch in asked])
            return values.mean()[None] if mean else values

        parts, plan = [], self.subject.data.plan()
        size = len(queries) if mean else block
        with unchanged(self.subject.model):
            for first in range(0, len(queries), size):
                asked = batches[first : first + size]
                parts.append(self.run.scores(partial(losses, asked), memory=self.memory))
            with torch.no_grad():
                passes = [bound(batch).cpu() for batch in self.subject.batches(plan)]
        order = positions(plan, None)
        scores = torch.cat(parts).float()
        return Scored(scores, None, None, torch.cat(passes)[order].float())

    def coverage(self, selection: Selection) -> dict[str, Any]:
        """All that was trained, in whatever modules it is."""
        covered, total = sum(x.numel() for x in self.run.params.values()), selection.total
        summary = f"covers {covered:,} of {total:,} parameters"
        return {"covered": covered, "total": total, "summary": summary, "left_out": []}

    def self_influence(self, damping: float) -> Tensor:
        raise ValueError("an unrolled run has no self-influence; take another method")

    def example_tokens(self, numbers: Sequence[int], gradients: Any) -> Any:
        raise ValueError("an unrolled run has no scores of tokens; take another method")

    def retrained(self, task: Task, examples: Tensor, seed: int) -> nn.Module:
        """The run's model if all but some examples had weight 0, with the same batches."""
        weights = torch.zeros(self.run.examples)
        weights[examples] = 1
        params = replace(self.run, progress=silent).train(weights)
        model = deepcopy(self.subject.model)
        model.load_state_dict(params, strict=False)
        return model

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        """The summed loss of every example of a batch, as other methods explain it: [n]"""
        return losses_of(self.subject.loss, model, batch)

    def _check_model(self, params: Mapping[str, Tensor]) -> None:
        """Refuse a run that does not lead to the model."""
        weights = dict(self.subject.model.named_parameters())
        names = [name for name in params if name in weights]
        ends = [(params[name].detach() - weights[name]).double().norm() for name in names]
        starts = [(self.run.params[name] - weights[name]).double().norm() for name in names]
        away, length = (float(torch.stack(norms).norm()) for norms in (ends, starts))
        if len(names) < len(params) or not away <= TOLERANCE * length:
            raise ValueError(
                f"the training run ends {away:.3g} away from the model, {length:.3g} from its "
                "start; give the run that made the model. If it is, training amplifies rounding "
                "errors, and no derivative describes it: lower the learning rate"
            )
