"""Losses that know their distribution: terms, labels drawn from it, roots of its Hessian.

A term is the loss of one prediction: terms have the shape of the outputs without their last
dimension, in which examples and positions stay apart. Masked terms have weight 0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

Forward = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
# (terms) or (terms, weights), both [N] or [N, ...] of N examples
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]


def of_pair(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Outputs and targets of a batch (inputs, targets)."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        keys, got = [0, 1], type(batch).__name__
        if isinstance(batch, Mapping):
            keys, got = [*batch, *keys], f"{got} of {', '.join(map(str, batch))}"
        elif isinstance(batch, tuple | list):
            got = f"{got} of {len(batch)}"
        x, y = (f"batch[{key!r}]" for key in keys[:2])
        raise ValueError(
            f"batch must be a pair (inputs, targets), got a {got}; say what to take of it: "
            f"CrossEntropy(forward=lambda model, batch: (model({x}), {y}))"
        )
    inputs, targets = batch
    return model(inputs), targets


@runtime_checkable
class Likelihood(Protocol):
    """A loss −log p(target | outputs), up to a constant, from which labels can be drawn."""

    @property
    def forward(self) -> Forward: ...

    def weights(self, targets: Tensor) -> Tensor:
        """1 for terms that count, 0 for those that do not."""
        ...

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor: ...

    def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Targets from p(· | outputs). The generator is on the host, and so are its numbers."""
        ...

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        """Vectors r, in the shape of outputs, with Σ rrᵀ the Hessian of each term."""
        ...


@dataclass(frozen=True)
class _Entries:
    """A loss that is a sum over the last dimension of outputs and targets."""

    forward: Forward = of_pair

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        outputs, targets = self.forward(model, batch)
        return self.terms(outputs, targets), self.weights(targets)

    def weights(self, targets: Tensor) -> Tensor:
        if targets.ndim < 2:
            raise ValueError(
                "targets must have the shape of the outputs, [n, ..., k], got "
                f"{tuple(targets.shape)}; give targets[:, None] where there is one output"
            )
        return torch.ones(targets.shape[:-1], device=targets.device)

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def second(self, outputs: Tensor) -> Tensor:
        """∂²term/∂output² of every entry; the Hessian is diagonal."""
        raise NotImplementedError

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        root = self.second(_wide(outputs)).sqrt().to(outputs.dtype)
        for c in range(outputs.size(-1)):
            yield functional.pad(root[..., c : c + 1], (c, outputs.size(-1) - c - 1))


@dataclass(frozen=True)
class CrossEntropy(_Entries):
    """−log softmax(outputs)[target], classes in the last dimension. Targets: integers."""

    ignore_index: int = -100

    def weights(self, targets: Tensor) -> Tensor:
        return (targets != self.ignore_index).float()

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        flat = _wide(outputs).reshape(-1, outputs.size(-1))
        losses = functional.cross_entropy(
            flat, targets.flatten(), ignore_index=self.ignore_index, reduction="none"
        )
        return losses.view(targets.shape)

    def terms_and_slopes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Terms and ∂term/∂outputs = p − e_target, without a graph; ignored targets have any."""
        logs = _wide(outputs).log_softmax(-1).view(-1, outputs.size(-1))
        labels = targets.flatten()
        losses = functional.nll_loss(logs, labels, ignore_index=self.ignore_index, reduction="none")
        slopes = logs.exp_()
        hit = labels.where(labels != self.ignore_index, 0)[:, None]
        slopes.scatter_add_(1, hit, slopes.new_full((), -1).expand_as(hit))
        return losses.view(targets.shape), slopes.view_as(outputs).to(outputs.dtype)

    def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        uniform = _uniform(outputs[..., 0], generator)
        below = outputs.double().softmax(-1).cumsum(-1)
        last = outputs.size(-1) - 1
        return torch.searchsorted(below, uniform.unsqueeze(-1)).squeeze(-1).clamp_max(last)

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        """diag(p) − ppᵀ = Σ_c r rᵀ, r = √p_c (e_c − p)."""
        p = _wide(outputs).softmax(-1)
        for c in range(outputs.size(-1)):
            root = -p
            root[..., c] += 1
            yield (root * p[..., c : c + 1].sqrt()).to(outputs.dtype)


@dataclass(frozen=True)
class SquaredError(_Entries):
    """‖outputs − target‖², summed over the last dimension: a Gaussian of variance ½."""

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (_wide(outputs) - targets).square().sum(-1)

    def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        # erfinv of a uniform number in (−1, 1) is a normal of variance ½
        inside = (2 * _uniform(outputs, generator) - 1).clamp(-1 + 1e-15, 1 - 1e-15)
        return outputs + torch.erfinv(inside).to(outputs.dtype)

    def second(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 2)


@dataclass(frozen=True)
class BinaryCrossEntropy(_Entries):
    """−Σ [t log σ(y) + (1 − t) log(1 − σ(y))] over the last dimension."""

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = _wide(outputs)
        losses = functional.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), reduction="none"
        )
        return losses.sum(-1)

    def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        return (_uniform(outputs, generator) < outputs.sigmoid()).to(outputs.dtype)

    def second(self, outputs: Tensor) -> Tensor:
        p = outputs.sigmoid()
        return p * (1 - p)


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers, drawn on the host: the same on every device."""
    return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def _wide(outputs: Tensor) -> Tensor:
    """In float32 at least: half precision loses small losses and probabilities."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def losses_of(loss: "Loss | Likelihood", model: nn.Module, batch: Any) -> Tensor:
    """The summed loss of every example [n]; of every term where these have one dimension."""
    if isinstance(loss, Likelihood):
        outputs, targets = loss.forward(model, batch)
        terms, weights = loss.terms(outputs, targets), loss.weights(targets)
    else:
        terms, weights = terms_and_weights(loss(model, batch))
    return (terms * weights).flatten(1).sum(1) if terms.ndim > 1 else terms * weights


def terms_and_weights(result: Any) -> tuple[Tensor, Tensor]:
    """Losses and weights, from what a user's loss has returned."""
    if isinstance(result, tuple) and len(result) != 2:
        raise ValueError(f"loss must return terms, or terms and weights, got {len(result)} things")
    terms, weights = result if isinstance(result, tuple) else (result, None)
    if not isinstance(terms, Tensor) or terms.ndim == 0:
        raise ValueError(
            "loss must return one loss a term, a tensor of at least one dimension, got "
            f"{'a scalar' if isinstance(terms, Tensor) else type(terms).__name__}; use "
            "reduction='none', so that the number of terms is known"
        )
    if weights is None:
        return terms, torch.ones_like(terms, requires_grad=False)
    if weights.shape != terms.shape:
        raise ValueError(
            f"loss must return weights in the shape of its terms {tuple(terms.shape)}, got "
            f"{tuple(weights.shape)}"
        )
    if not bool((weights >= 0).all()):
        raise ValueError(f"weights of loss terms must be at least 0, got {float(weights.min())}")
    return terms, weights.to(terms.dtype)
