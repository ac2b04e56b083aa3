"""Exact curvature of a model, as products with a tangent: what factors are to be compared with.

Matrix-free, by torch.func. All are means over the loss terms of the data that count. A tangent has
one tensor a parameter, by name; parameters it leaves out are held still.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp

from isokron.curvature.likelihoods import Likelihood, Loss, terms_and_weights

Tangent = Mapping[str, Tensor]


def hessian_vector_product(
    model: nn.Module, batches: Iterable[Any], loss: Loss, tangent: Tangent
) -> dict[str, Tensor]:
    """∇²L v, L the sum of the terms."""

    def product(called: Callable[..., Any], params: Tangent, batch: Any) -> tuple[Any, float]:
        def total(own: Tangent) -> Tensor:
            terms, weights = terms_and_weights(loss(called(own), batch))
            return (terms * weights).sum()

        return jvp(grad(total), (params,), (dict(tangent),))[1], _count(loss(called(params), batch))

    return _mean(model, batches, tangent, product)


def fisher_vector_product(
    model: nn.Module, batches: Iterable[Any], loss: Loss, tangent: Tangent
) -> dict[str, Tensor]:
    """Σ ∇∇ᵀv over examples, the first dimension of the terms: the empirical Fisher."""

    def product(called: Callable[..., Any], params: Tangent, batch: Any) -> tuple[Any, float]:
        def losses(own: Tangent) -> Tensor:
            terms, weights = terms_and_weights(loss(called(own), batch))
            return (terms * weights).flatten(1).sum(1) if terms.ndim > 1 else terms * weights

        along = jvp(losses, (params,), (dict(tangent),))[1]
        return vjp(losses, params)[1](along)[0], _count(loss(called(params), batch))

    return _mean(model, batches, tangent, product)


def ggn_vector_product(
    model: nn.Module, batches: Iterable[Any], loss: Likelihood, tangent: Tangent
) -> dict[str, Tensor]:
    """Jᵀ(∇²ℓ)J v, J of the outputs and ∇²ℓ of the terms in them: the exact Fisher."""

    def product(called: Callable[..., Any], params: Tangent, batch: Any) -> tuple[Any, float]:
        targets = loss.forward(called(params), batch)[1]
        weights = loss.weights(targets)

        def outputs(own: Tangent) -> Tensor:
            return loss.forward(called(own), batch)[0]

        def total(y: Tensor) -> Tensor:
            return (loss.terms(y, targets) * weights).sum()

        y, along = jvp(outputs, (params,), (dict(tangent),))[:2]
        bent = jvp(grad(total), (y,), (along,))[1]
        return vjp(outputs, params)[1](bent)[0], float(weights.sum())

    return _mean(model, batches, tangent, product)


def _mean(
    model: nn.Module,
    batches: Iterable[Any],
    tangent: Tangent,
    product: Callable[[Callable[..., Any], Tangent, Any], tuple[Any, float]],
) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    unknown = sorted(set(tangent) - set(named))
    if unknown:
        raise ValueError(
            f"tangent must name parameters of the model, got {unknown[0]!r}; it has "
            f"{', '.join(list(named)[:4])}, …"
        )
    params = {name: named[name].detach() for name in tangent}

    def called(own: Tangent) -> Callable[..., Any]:
        return lambda *args, **kwargs: functional_call(model, dict(own), args, kwargs)

    sums = {name: torch.zeros_like(value) for name, value in params.items()}
    terms = 0.0
    for batch in batches:
        found, count = product(called, params, batch)
        terms += count
        for name, value in found.items():
            sums[name] += value.detach()
    if terms == 0:
        raise ValueError("batches must hold at least one loss term that counts, got none")
    return {name: value / terms for name, value in sums.items()}


def _count(result: Any) -> float:
    return float(terms_and_weights(result)[1].sum())
