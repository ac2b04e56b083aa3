"""Whether gradients can be stepped on, asked before anything changes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.optim.groups import param_name


def check_gradients(optimizer: str, group: Mapping[str, Any]) -> None:
    """Refuse sparse and complex gradients."""
    for i, param in enumerate(group["params"]):
        grad = param.grad
        if grad is not None and (grad.layout is not torch.strided or grad.is_complex()):
            kind = "complex" if grad.is_complex() else "sparse"
            remedy = (
                "take the gradient of a real loss of real parameters"
                if kind == "complex"
                else "make the layer with sparse=False or call .to_dense() on the gradient"
            )
            raise RuntimeError(
                f"{optimizer} does not support {kind} gradients, got one for parameter "
                f"{param_name(group, i)}; {remedy}"
            )


def all_finite(grads: Sequence[Tensor]) -> bool:
    """Whether every element is finite, waiting once a device and not once a tensor."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    # the largest magnitude cannot overflow, unlike a sum, and NaN wins every comparison
    largest: dict[torch.device, list[Tensor]] = {}
    for (device, _), tensors in kinds.items():
        norms = torch.stack(torch._foreach_norm(tensors, float("inf")))
        largest.setdefault(device, []).append(norms.double().amax())
    return all(bool(torch.stack(norms).isfinite().all()) for norms in largest.values())


def nonfinite_names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parameters whose gradients are not finite; only asked once one is known to be."""
    return [
        param_name(group, i)
        for group in groups
        for i, param in enumerate(group["params"])
        if param.grad is not None and not bool(param.grad.isfinite().all())
    ]
