"""One real training step on the proponents of a query, on random examples, and on its opponents.

The model is not changed: a step is taken on copies of its weights. All steps have the same length,
so that what differs is their direction only: the largest with which no step, to first order, lowers
the loss of its own examples by more than a hundredth.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from isokron.curvature.losses import Likelihood, Loss, terms_and_weights

SHARE = 0.01  # of the examples' own loss, by which a step lowers it at most, to first order


def verify(
    model: nn.Module,
    loss: Loss | Likelihood,
    query: Any,
    batch: Callable[[Sequence[int]], Any],
    groups: Mapping[str, Sequence[int]],
    share: float = SHARE,
) -> dict[str, float | None]:
    """The query's loss "before", and its change in nats after one step on each group of examples.

    `batch`: the training examples of some numbers, on the model's device. An empty group has None.
    "step": the length of the steps.
    """
    module = getattr(model, "_orig_mod", model)  # a compiled model shares its weights
    modes = {part: part.training for part in module.modules()}
    # in half precision a small step would be lost in rounding
    params = {name: _wide(param.detach()) for name, param in module.named_parameters()}
    query = _wide(query)
    module.eval()
    try:
        before = _total(module, params, loss, query)
        gradients = {
            name: _gradient(module, params, loss, _wide(batch(numbers)))
            for name, numbers in groups.items()
            if numbers
        }
        step = min(share * value / max(norm, 1e-30) for value, norm, _ in gradients.values())
        changes: dict[str, float | None] = {"step": step, "before": before}
        for name in groups:
            changes[name] = None
            if name in gradients:
                _, norm, grads = gradients[name]
                stepped = {
                    key: param - step / max(norm, 1e-30) * grads[key] if key in grads else param
                    for key, param in params.items()
                }
                changes[name] = _total(module, stepped, loss, query) - before
    finally:
        for part, training in modes.items():
            part.training = training
    return changes


def _wide(value: Any) -> Any:
    """Tensors of half precision in float32, also within a batch."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Mapping):
        return {key: _wide(part) for key, part in value.items()}
    return type(value)(map(_wide, value)) if type(value) in (tuple, list) else value


class _WithWeights:
    """The model with other weights in the place of its own, to be called as it is."""

    def __init__(self, module: nn.Module, params: dict[str, Tensor]) -> None:
        self.module, self.params = module, params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.module, self.params, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@torch.no_grad()
def _total(
    module: nn.Module, params: dict[str, Tensor], loss: Loss | Likelihood, batch: Any
) -> float:
    terms, weights = terms_and_weights(loss(_WithWeights(module, params), batch))  # type: ignore[operator, arg-type]
    return float((terms * weights).sum())


def _gradient(
    module: nn.Module, params: dict[str, Tensor], loss: Loss | Likelihood, batch: Any
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss of some examples, the norm of its gradient, and that by parameter."""
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
    with torch.enable_grad():
        terms, weights = terms_and_weights(loss(_WithWeights(module, leaves), batch))  # type: ignore[operator, arg-type]
        total = (terms * weights).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    named = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in named.values()]
    return float(total.detach()), float(torch.stack(norms).norm()), named
