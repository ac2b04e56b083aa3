"""Whether gradients can be stepped on, asked before anything changes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import local
from isokron.optim.groups import param_name


def check_gradients(
    optimizer: str, groups: Sequence[Mapping[str, Any]], squares: bool
) -> str | None:
    """Raise for gradients no step could use, or say why to skip this one; None: step.

    `squares`: gradients that overflow when squared are as bad as infinite ones.
    """
    for group in groups:
        _check_kinds(optimizer, group)
    for mode in ("raise", "skip"):
        asking = [group for group in groups if group["nonfinite"] == mode]
        grads = [local(p.grad) for group in asking for p in group["params"] if p.grad is not None]
        if not grads or _surely_finite(grads, squares):
            continue
        wrong = _what_is_wrong(asking, squares)
        if wrong and mode == "raise":
            raise FloatingPointError(
                f"{optimizer}: {wrong}; nothing was changed. Clip or unscale gradients before the "
                'step, or pass nonfinite="skip"'
            )
        if wrong:
            return wrong
    return None


def _check_kinds(optimizer: str, group: Mapping[str, Any]) -> None:
    """Refuse sparse and complex gradients."""
    # first all at once: over many small tensors this is much of AdamW's time
    grads = [grad for param in group["params"] if (grad := param.grad) is not None]
    dtypes = {grad.dtype for grad in grads}
    if {grad.layout for grad in grads} <= {torch.strided} and not any(d.is_complex for d in dtypes):
        return
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


def _surely_finite(grads: Sequence[Tensor], squares: bool = False) -> bool:
    """True only if every element is finite, waiting once a device and not once a tensor.

    By sums, which no NaN or infinity leaves finite and which read memory at its full speed; a sum
    of huge finite numbers may overflow, so False only means that one has to look. `squares`: also
    the sum of squares, which bounds every entry of every Gram matrix.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        total = _sum_of_squares(grad) if squares else grad.sum(dtype=_wide(grad))
        sums.setdefault(grad.device, []).append(total.double())
    return all(bool(torch.stack(several).isfinite().all()) for several in sums.values())


def _sum_of_squares(grad: Tensor) -> Tensor:
    flat = grad.reshape(-1).to(_wide(grad))
    return torch.dot(flat, flat)


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _what_is_wrong(groups: Sequence[Mapping[str, Any]], squares: bool) -> str:
    """What is wrong with the gradients, by name; asked only where a sum was not finite."""
    nonfinite, huge = [], []
    for group in groups:
        for i, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            grad = local(param.grad)
            if not bool(grad.isfinite().all()):
                nonfinite.append(param_name(group, i))
            elif squares and not bool(_sum_of_squares(grad).isfinite()):
                huge.append(param_name(group, i))
    found = []
    if nonfinite:
        found.append(f"non-finite gradient of parameter {', '.join(nonfinite)}")
    if huge:
        found.append(f"gradient too large to be squared, of parameter {', '.join(huge)}")
    return "; ".join(found)
