"""Check scores by real training steps from the trained weights, without retraining.

`verify` takes one training step on the proponents of a query, one on random examples and one on the
opponents. `calibrate` measures how the query's loss would change without some examples.

Steps are taken on copies of the weights; the model is not changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isokron.attribution.data import Subject, spread
from isokron.curvature import Curvature
from isokron.curvature.gauss_newton import WithWeights
from isokron.curvature.losses import Likelihood, terms_and_weights

SHARE = 0.01  # largest fraction by which a step lowers the loss of its examples, to first order
SAMPLE = 64  # training examples on which the curvature along a direction is measured
LINEAR = (0.5, 2.0)  # range of measured over predicted change in which predictions are shown

Weights = dict[str, Tensor]


def verify(
    subject: Subject, query: Any, groups: Mapping[str, Sequence[int]], share: float = SHARE
) -> dict[str, float | None]:
    """Change of the query's loss, in nats, after one step on each group of examples.

    All steps have the same length, so that they differ in direction only: the largest length with
    which no step lowers the loss of its own examples by more than `share`, to first order. An
    empty group has None. Also returns the loss "before" and the length of the "step".
    """
    with _at_weights(subject) as (weights, total):
        before = float(total(weights, query))
        steps = {
            name: _gradient(subject, weights, total, numbers)
            for name, numbers in groups.items()
            if numbers
        }
        norms = {name: max(_norm(gradient), 1e-30) for name, (_, gradient) in steps.items()}
        length = min(share * steps[name][0] / norms[name] for name in steps)
        changes: dict[str, float | None] = {"step": length, "before": before}
        for name in groups:
            changes[name] = None
            if name in steps:
                stepped = _moved(weights, steps[name][1], -length / norms[name])
                changes[name] = float(total(stepped, query)) - before
    return changes


def calibrate(
    subject: Subject, query: Any, examples: Sequence[int], inverse: Curvature, predicted: float
) -> float | None:
    """Nats by which the query's loss rises per unit of score when `examples` are left out.

    Without these examples the training loss is L − L_S, whose minimum along d = H⁻¹∇L_S is at
    α = ⟨d, ∇L_S⟩ / ⟨d, ∇²L d⟩: H gives the direction, and the curvature along it is measured by
    two small steps. The query's loss is measured at θ + αd. None unless its change is between half
    and twice α·`predicted`, where `predicted` is the sum of the examples' scores.
    """
    data = subject.data
    sample = spread(len(data), min(SAMPLE, len(data)))
    with _at_weights(subject) as (weights, total):
        examples_loss, gradient = _gradient(subject, weights, total, examples)
        unused = {name: torch.zeros_like(w) for name, w in weights.items() if name not in gradient}
        gradient |= unused
        direction = inverse.matvec(gradient)
        slope = sum(float((direction[key] * gradient[key]).sum()) for key in direction)
        if not slope > 0:
            return None
        step = SHARE * examples_loss / slope

        def training_loss(shift: float) -> float:
            moved = _moved(weights, direction, shift)
            losses = [float(total(moved, subject.batch(batch))) for batch in data.plan(sample)]
            return sum(losses) * len(data) / len(sample)

        bend = training_loss(step) + training_loss(-step) - 2 * training_loss(0.0)
        if not bend > 0:
            return None
        best = slope * step * step / bend
        moved = total(_moved(weights, direction, best), query)
        change = float(moved) - float(total(weights, query))
    ratio = change / (best * predicted) if predicted else 0.0
    return best * ratio if LINEAR[0] <= ratio <= LINEAR[1] else None


@contextmanager
def _at_weights(
    subject: Subject,
) -> Iterator[tuple[Weights, Callable[[Weights, Any], Tensor]]]:
    """The model's weights, and a function from weights and a batch to the batch's summed loss."""
    # a compiled model shares its weights with the original
    module = getattr(subject.model, "_orig_mod", subject.model)

    # in half precision, rounding would hide a small step
    buffers = {name: _wide(buffer) for name, buffer in module.named_buffers()}

    def total(weights: Weights, batch: Any) -> Tensor:
        network: Any = WithWeights(module, {**weights, **buffers})
        loss, batch = subject.loss, _wide(batch)
        if isinstance(loss, Likelihood):
            outputs, targets = loss.forward(network, batch)
            # float32 has no digits left for the change of a loss near 0
            return (loss.terms(outputs.double(), targets) * loss.weights(targets)).sum()
        terms, counts = terms_and_weights(loss(network, batch))
        return (terms * counts).sum()

    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield {name: _wide(param) for name, param in module.named_parameters()}, total
    finally:
        for part, training in modes.items():
            part.training = training


def _wide(value: Any) -> Any:
    """Half-precision tensors in float32, also within a batch."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Mapping):
        return {key: _wide(part) for key, part in value.items()}
    return type(value)(map(_wide, value)) if type(value) in (tuple, list) else value


def _gradient(
    subject: Subject,
    weights: Weights,
    total: Callable[[Weights, Any], Tensor],
    examples: Sequence[int],
) -> tuple[float, Weights]:
    """Loss of some examples and its gradient, without parameters it does not depend on."""
    leaves = {name: param.detach().clone().requires_grad_() for name, param in weights.items()}
    loss, sums = 0.0, dict[str, Tensor]()
    # in batches of the size that the memory plan allows
    for numbers in subject.data.plan(examples):
        with torch.enable_grad():
            value = total(leaves, subject.batch(numbers))
            grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        loss += float(value.detach())
        for name, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                sums[name] = sums[name] + grad if name in sums else grad
    return loss, sums


def _moved(weights: Weights, direction: Weights, step: float) -> Weights:
    return {
        name: param + step * direction[name] if name in direction else param
        for name, param in weights.items()
    }


def _norm(gradient: Weights) -> float:
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in gradient.values()]
    return float(torch.stack(norms).norm())
