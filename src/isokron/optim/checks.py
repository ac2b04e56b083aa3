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


def surely_finite(grads: Sequence[Tensor]) -> bool:
    """True only if every element is finite, waiting once a device and not once a tensor.

    By sums, which no NaN or infinity leaves finite and which read memory at its full speed; a sum
    of huge finite numbers may overflow, so False only means that one has to look.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        wide = torch.promote_types(grad.dtype, torch.float32)
        sums.setdefault(grad.device, []).append(grad.sum(dtype=wide).double())
    return all(bool(torch.stack(several).isfinite().all()) for several in sums.values())


def nonfinite_names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parameters whose gradients are not finite; asked only where a sum was not finite."""
    return [
        param_name(group, i)
        for group in groups
        for i, param in enumerate(group["params"])
        if param.grad is not None and not bool(param.grad.isfinite().all())
    ]
