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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from isokron.attribution.memory import available_bytes
from isokron.training import Progress, silent

# (params, state, batch, weights of its examples) → (params, state)
Step = Callable[[Any, Any, Any, Tensor], tuple[Any, Any]]
# parameters → losses of Q queries [Q]
QueryLosses = Callable[[Any], Tensor]
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

    def __post_init__(self) -> None:
        if not len(self.order):
            raise ValueError("order must have the indices of at least one step, got none")
        for numbers in self.order:
            if not isinstance(numbers, Tensor) or not len(numbers):
                raise ValueError(
                    f"order must have a tensor of indices for every step, got {numbers!r}"
                )
            if not 0 <= int(numbers.min()) <= int(numbers.max()) < self.examples:
                raise ValueError(
                    f"order must have indices from 0 to {self.examples - 1}, the number of "
                    f"`examples` less one, got {int(numbers.min())} to {int(numbers.max())}"
                )

    def train(self, weights: Tensor | None = None) -> Any:
        """The trained parameters. weights: of all examples, [N]; default: 1."""
        if weights is not None and tuple(weights.shape) != (self.examples,):
            raise ValueError(
                f"weights must be one number for each of the {self.examples} examples, got shape "
                f"{tuple(weights.shape)}"
            )
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
        if segment is not None and (not isinstance(segment, int) or segment < 1):
            raise ValueError(f"segment must be a whole number of at least 1, got {segment!r}")
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
            check_end(tape[0].outputs, self._advanced(saved[0], 0), range(1))
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


def check_end(outputs: Sequence[Tensor], end: Any, steps: range) -> None:
    """Refuse steps that end elsewhere when they are computed again.

    Inverse roots in the state differ by the rounding errors of small eigenvalues, which hardly
    matter to the parameters.
    """
    leaves, count = _floating(tree_flatten(end)[0]), len(_floating(tree_flatten(end[0])[0]))
    for i, pair in enumerate(zip(outputs, leaves, strict=True)):
        again, first = (leaf.detach() for leaf in pair)
        difference, size = float((again - first).norm()), float(first.norm())
        # devices that add in any order differ in the last bits
        if not difference <= (torch.finfo(first.dtype).eps ** 0.4 if i < count else 0.1) * size:
            raise ValueError(
                f"steps {steps.start + 1} to {steps.stop} ended elsewhere when they were "
                f"computed again: a tensor of shape {tuple(first.shape)} differs by "
                f"{difference:.3g}; the derivative of a run needs a step that depends on its "
                "arguments alone: seed dropout from the state, and take deterministic kernels; "
                "where SOAP or Shampoo amplify rounding errors, take Katie or more damping"
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
