"""Whether gradients can be stepped on, asked before anything changes."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import local
from isokron.optim.blocks import SMALL
from isokron.optim.settings import param_name


def gradient_sums(groups: Sequence[Mapping[str, Any]], squares: bool) -> list[Tensor]:
    """Sums of all gradients that are to be finite: no NaN or infinity leaves its sum finite.

    Sums read memory at its full speed. `squares`: sums of squares, which bound every entry of every
    Gram matrix: gradients that overflow when squared are as bad as infinite ones.
    """
    asking = [group for group in groups if group["nonfinite"] != "ignore"]
    equal: dict[tuple[Any, ...], list[Tensor]] = {}
    for grad in (p.grad for group in asking for p in group["params"]):
        if grad is not None:
            part = grad if type(grad) is Tensor else local(grad)
            equal.setdefault((part.shape, part.dtype, part.device), []).append(part)
    asked: list[Tensor] = []
    for grads in equal.values():
        together = len(grads) > 1 and grads[0].numel() <= SMALL
        asked += [torch.stack(grads)] if together else grads
    return [_sum_of_squares(grad) if squares else grad.sum(dtype=_wide(grad)) for grad in asked]


def check_sums(
    optimizer: str,
    groups: Sequence[Mapping[str, Any]],
    squares: bool,
    sums: Sequence[Sequence[float]],
) -> str | None:
    """Raise, or say why to skip the step, where `gradient_sums` are not finite; None: step."""
    if all(isfinite(value) for values in sums for value in values):
        return None
    # a sum of huge finite numbers may overflow too, so now the gradients themselves are asked
    for mode in ("raise", "skip"):
        wrong = _what_is_wrong([group for group in groups if group["nonfinite"] == mode], squares)
        if wrong and mode == "raise":
            raise FloatingPointError(
                f"{optimizer}: {wrong}; nothing was changed. Clip or unscale gradients before the "
                'step, or pass nonfinite="skip"'
            )
        if wrong:
            return wrong
    return None


def check_types(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse sparse and complex gradients."""
    for group in groups:
        _check_group_types(optimizer, group)


def _check_group_types(optimizer: str, group: Mapping[str, Any]) -> None:
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
