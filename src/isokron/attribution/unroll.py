"""Exact influence: the derivative of a query's loss through the whole training run.

Example i of the training set has a weight w_i = 1 in the loss of its batches,

    L_t(θ) = Σ_{i in B_t} w_i l_i(θ) / |B_t|,   g_t = ∇L_t(θ_{t−1}),   x_t = U_t(x_{t−1}, g_t)

with x = (θ, s) the parameters and the optimizer's state. Reverse mode carries the adjoint
a_t = ∂q/∂x_t of a query's loss q(θ_T) from T to 1, by one vector-Jacobian product of every step:

    a_{t−1} = (∂x_t/∂x_{t−1})ᵀ a_t,   ∂q/∂w_i = Σ_{t: i in B_t} (∂x_t/∂w_i)ᵀ a_t

and the score of example i is −∂q/∂w_i: to first order, the rise of the query's loss if the example
had weight 0 in every batch. States are saved every √T steps, and the steps between are computed
again when they are reversed. References: Maclaurin et al. 1502.03492; MAGIC, Ilyas and Engstrom
2504.16430.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from isokron.attribution.data import Subject, to_device
from isokron.attribution.memory import available_bytes
from isokron.attribution.queries import Query
from isokron.attribution.scorers import ExactScorer, Scored, positions
from isokron.curvature import Curvature
from isokron.curvature.backward import unchanged
from isokron.curvature.losses import Likelihood, terms_and_weights
from isokron.optim.functional_step import FunctionalStep
from isokron.tasks import Batch, Task
from isokron.training import Progress, batch_order, silent, warmup_cosine

# (params, state, batch, weights of its examples) → (params, state)
Step = Callable[[Any, Any, Any, Tensor], tuple[Any, Any]]
# parameters → losses of Q queries [Q]
QueryLosses = Callable[[Any], Tensor]
TOLERANCE = 0.01  # distance between the run's end and the model, relative to that of its start
Adjoints = list[Tensor | None]  # [Q, ...] of every leaf; None where it is zero


class Recorded(NamedTuple):
    """A step with its graph: leaves of (params, state) before and after it."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    weights: Tensor

    def pulled_back(self, adjoints: Adjoints) -> tuple[Adjoints, Tensor]:
        """Adjoints [Q, ...] of the inputs, and of the weights [Q, B], from those of the outputs."""
        pairs = [
            (output, adjoint)
            for output, adjoint in zip(self.outputs, adjoints, strict=True)
            if adjoint is not None and output.requires_grad
        ]
        outputs, given = [output for output, _ in pairs], [adjoint for _, adjoint in pairs]
        results = vector_jacobian(outputs, [*self.inputs, self.weights], given)
        slopes = results.pop()
        if slopes is None:
            raise ValueError(
                "step must depend on the weights of examples: minimize (weights * losses).sum() / "
                "len(losses), with create_graph=True where weights.requires_grad"
            )
        return results, slopes


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """A training run as a function of the weights of its examples.

    `step` must depend on its arguments alone and must not change them in place. It is called in
    grad mode, with parameters that require gradients, and may take create_graph=True only where
    `weights.requires_grad`: otherwise no derivative of the step is needed.

    Args:
        step: (params, state, batch, weights) → (params, state) after minimizing
            (weights * losses).sum() / len(losses); pytrees of tensors, differentiable in torch.
        params: initial parameters, a pytree of tensors.
        state: initial state of the optimizer, a pytree of tensors; integers are constants.
        batch: indices of examples → the batch that `step` takes.
        order: the indices of the examples of every step; an example may occur many times.
        examples: number of training examples.
        progress: called with the stage, the steps done and their number.
    """

    step: Step
    params: Any
    state: Any
    batch: Callable[[Tensor], Any]
    order: Sequence[Tensor]
    examples: int
    progress: Progress = silent

    def train(self, weights: Tensor | None = None) -> Any:
        """The trained parameters. weights: of all examples, [N]; default: 1."""
        point = (self.params, self.state)
        for t in range(len(self.order)):
            point = self._advanced(point, t, weights)
            self.progress("training", t + 1, len(self.order))
        return point[0]

    def scores(
        self, queries: QueryLosses, *, segment: int | None = None, memory: int | None = None
    ) -> Tensor:
        """−∂q/∂w of all examples for every query: [Q, N]

        Args:
            queries: trained parameters → losses [Q], differentiable.
            segment: steps between saved states, whose graphs are in memory at once; default: √T,
                or fewer if their graphs would take more than `memory`.
            memory: bytes for graphs; default: half of the free memory.
        """
        total, tape, saved = len(self.order), list[Recorded](), list[Any]()
        size = segment or self._segment(memory)
        starts, point = range(0, total, size), (self.params, self.state)
        for t in range(total):
            if t in starts:
                saved.append(point)
            if t < starts[-1]:
                point = self._advanced(point, t)
            else:  # the graphs of the last segment are kept
                recorded, point = self._recorded(point, t)
                tape.append(recorded)
            self.progress("training", t + 1, total)
        if len(starts) == 1:
            # nothing is computed again, except for this check
            check_end(self._advanced(saved[0], 0), tape[0].outputs, range(1))
        adjoints = self._final_adjoints(point, queries)
        count = max(len(adjoint) for adjoint in adjoints if adjoint is not None)
        scores = torch.zeros(count, self.examples, dtype=tape[0].weights.dtype)
        for start in reversed(starts):
            steps, end, point = range(start, min(start + size, total)), point, saved.pop()
            begin = point
            for t in steps if not tape else ():
                recorded, begin = self._recorded(begin, t)
                tape.append(recorded)
            check_end(tape[-1].outputs, end, steps)
            for t in reversed(steps):
                # a step's graph is freed as soon as it is reversed
                adjoints, slopes = tape.pop().pulled_back(adjoints)
                scores.index_add_(1, self.order[t].cpu(), -slopes.cpu())
                self.progress("unroll", total - t, total)
        return scores

    def _segment(self, memory: int | None) -> int:
        """√T steps, or as many as have graphs that fit in memory."""
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        point, total = (self.params, self.state), len(self.order)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            recorded, _ = self._recorded(point, 0)
        if memory is None:
            memory = available_bytes(recorded.weights.device) // 2
        graphs = memory // max(1, sum(sizes.values()))
        return max(1, min(math.isqrt(total), graphs))

    def _advanced(self, point: Any, t: int, weights: Tensor | None = None) -> Any:
        """(params, state) after step t, without a graph."""
        numbers = self.order[t]
        of_batch = torch.ones(len(numbers)) if weights is None else weights[numbers]
        leaves, shape = _leaves(point)
        with torch.enable_grad():
            params, state = tree_unflatten(leaves, shape)
            advanced = self.step(params, state, self.batch(numbers), of_batch.to(leaves[0]))
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, advanced)

    def _recorded(self, point: Any, t: int) -> tuple[Recorded, Any]:
        """Step t with its graph, and (params, state) after it."""
        leaves, shape = _leaves(point)
        weights = torch.ones(len(self.order[t])).to(leaves[0]).requires_grad_()
        with torch.enable_grad():
            params, state = tree_unflatten(leaves, shape)
            point = self.step(params, state, self.batch(self.order[t]), weights)
        outputs, new_shape = tree_flatten(point)
        if new_shape != shape:
            raise ValueError(
                f"step must return params and state in the form in which it gets them, got "
                f"{new_shape} for {shape}"
            )
        return Recorded(_floating(leaves), _floating(outputs), weights), point

    def _final_adjoints(self, point: Any, queries: QueryLosses) -> Adjoints:
        """∂q/∂(θ_T, s_T): one [Q, ...] per leaf, None where it is zero."""
        leaves, shape = _leaves(point)
        with torch.enable_grad():
            losses = queries(tree_unflatten(leaves, shape)[0])
        if losses.ndim != 1 or not losses.requires_grad:
            raise ValueError(
                "queries must return one differentiable loss per query, [Q], got shape "
                f"{tuple(losses.shape)} with requires_grad={losses.requires_grad}"
            )
        return vector_jacobian([losses], _floating(leaves), [torch.eye(len(losses)).to(losses)])


def vector_jacobian(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], adjoints: Sequence[Tensor]
) -> Adjoints:
    """Σ (∂output/∂input)ᵀ adjoint for Q adjoints [Q, ...] of every output: [Q, ...] per input."""
    count, rows = len(adjoints[0]), []
    for q in range(count):
        row = [adjoint[q] for adjoint in adjoints]
        keep = q + 1 < count
        rows.append(torch.autograd.grad(outputs, inputs, row, retain_graph=keep, allow_unused=True))
    # a view for the usual single query
    joined = torch.stack if count > 1 else lambda column: column[0][None]
    return [None if c[0] is None else joined(c) for c in zip(*rows, strict=True)]


def check_end(point: Any, end: Any, steps: range) -> None:
    """Refuse steps that end elsewhere when they are computed again."""
    for leaf, first in zip(*(_floating(tree_flatten(x)[0]) for x in (point, end)), strict=True):
        difference, first = float((leaf.detach() - first.detach()).norm()), first.detach()
        # devices that add in any order differ in the last bits
        if not difference <= torch.finfo(first.dtype).eps ** 0.5 * float(first.norm()):
            raise ValueError(
                f"steps {steps.start + 1} to {steps.stop} ended elsewhere when they were computed "
                f"again: a tensor of shape {tuple(first.shape)} differs by {difference:.3g}; the "
                "derivative of a run needs a step that depends on its arguments alone: seed "
                "dropout from the state, and take deterministic kernels"
            )


def _leaves(point: Any) -> tuple[list[Any], Any]:
    """The leaves of (params, state), cut from their graph; floating ones require gradients."""
    leaves, shape = tree_flatten(point)
    leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
    for leaf in _floating(leaves):
        leaf.requires_grad_()
    return leaves, shape


def _floating(leaves: Sequence[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


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
    of the run's. Statistics, roots and eigenbases of SOAP, Shampoo and Katie are constants.

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
    numbers = torch.as_tensor(range(len(task.train)) if examples is None else examples)
    device = next(model.parameters()).device
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    functional, bound = FunctionalStep(optimizer, trained), _Bound(model, task.losses)

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
                "give run=isokron.attribution.unroll.task_run(task, model, optimizer, steps, seed)"
            )
        if run.examples != len(subject.data):
            raise ValueError(
                f"run must have the {len(subject.data)} training examples of the attributor, got "
                f"{run.examples}; give both the same examples"
            )
        return cls(subject, inverse, task, run, memory)

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

    def self_influence(self, damping: float) -> Tensor:
        raise ValueError("an unrolled run has no self-influence; take another --method")

    def example_tokens(self, numbers: Sequence[int], gradients: Any) -> Any:
        raise ValueError("an unrolled run has no scores of tokens; take another --method")

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
        loss = self.subject.loss
        if isinstance(loss, Likelihood):
            outputs, targets = loss.forward(model, batch)
            terms, counts = loss.terms(outputs, targets), loss.weights(targets)
        else:
            terms, counts = terms_and_weights(loss(model, batch))
        return (terms * counts).flatten(1).sum(1) if terms.ndim > 1 else terms * counts

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
