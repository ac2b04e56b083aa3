"""Checks before a step changes anything: of gradients, and that no earlier step has failed."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from isokron.distributed import local
from isokron.optim.blocks import SMALL
from isokron.optim.settings import param_name

logger = logging.getLogger(__name__)

Group = Mapping[str, Any]
FLOAT16_ROOT = 255.9  # its square is almost the largest number in float16
# every step asks them of every parameter: in C, a list at a time
SHAPE, DTYPE, LAYOUT, GRAD = map(attrgetter, ("shape", "dtype", "layout", "grad"))


Squares = Callable[[Any, Group], bool]  # (param, group) → whether its gradient is squared


def gradient_sums(groups: Sequence[Group]) -> list[Tensor]:
    """Numbers of each gradient that are finite if it is, and if its squares are.

    Sums of squares, which take no longer than sums; only what is squared must have a finite one.
    """
    # small gradients of one shape are stacked, because launches and syncs take most of the time
    equal: dict[tuple[Any, ...], list[Tensor]] = {}
    for group in groups:
        if group["nonfinite"] == "ignore":
            continue
        narrow = _has_narrow_state(group)
        for grad in (p.grad for p in group["params"]):
            if grad is not None:
                part = grad if type(grad) is Tensor else local(grad)
                form = (part.shape, part.dtype, part.device, narrow)
                equal.setdefault(form, []).append(part)
    sums: list[Tensor] = []
    for (_, dtype, _, narrow), grads in equal.items():
        together = len(grads) > 1 and grads[0].numel() <= SMALL
        tensors = [torch.stack(grads)] if together else grads
        sums += map(_largest if narrow and dtype is torch.float16 else _size, tensors)
    return sums


def check_sums(
    optimizer: str,
    groups: Sequence[Group],
    squares: Squares,
    sums: Sequence[Sequence[float]],
) -> str | None:
    """Raise, or return why to skip the step, if `gradient_sums` are not finite; None: step."""
    if all(isfinite(value) for values in sums for value in values):
        return None
    # squares may overflow that nobody needs, so look at the gradients themselves
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
        # first all at once: over many small tensors this is much of AdamW's time
        grads = [grad for grad in map(GRAD, group["params"]) if grad is not None]
        strided = set(map(LAYOUT, grads)) <= {torch.strided}
        if strided and not any(dtype.is_complex for dtype in set(map(DTYPE, grads))):
            continue
        for i, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None or (grad.layout is torch.strided and not grad.is_complex()):
                continue
            kind, remedy = "sparse", "make the layer with sparse=False or call .to_dense() on it"
            if grad.is_complex():
                kind, remedy = "complex", "take the gradient of a real loss of real parameters"
            raise RuntimeError(
                f"{optimizer} does not support {kind} gradients, got one for parameter "
                f"{param_name(group, i)}; {remedy}"
            )


@dataclass(frozen=True)
class Forms:
    """What state depends on, and `param.data = …` and `model.double()` change."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    devices: list[int]  # numbers; the CPU's is −1

    def hold(self, params: Sequence[Tensor]) -> bool:
        """Whether parameters, as many as there were, still have them."""
        return (
            list(map(SHAPE, params)) == self.shapes
            and list(map(DTYPE, params)) == self.dtypes
            and list(map(Tensor.get_device, params)) == self.devices
        )


def forms_of(params: Sequence[Tensor]) -> Forms:
    return Forms(
        list(map(SHAPE, params)), list(map(DTYPE, params)), list(map(Tensor.get_device, params))
    )


def check_shapes(
    optimizer: str,
    group: Group,
    shapes: Mapping[Tensor, torch.Size],
    state: Mapping[Tensor, Any],
) -> None:
    """Refuse parameters with state whose shape is not what it was: `param.data = …` changes it."""
    for i, param in enumerate(group["params"]):
        shape = shapes.get(param, param.shape)
        if param.shape != shape and state.get(param):
            raise ValueError(
                f"{optimizer}: parameter {param_name(group, i)} must keep its shape between steps, "
                f"but its state is for {tuple(shape)}; make the optimizer anew"
            )


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """At least float32, in which sums of half precision neither overflow nor lose their digits."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _size(grad: Tensor) -> Tensor:
    """Σg² in float32, or ‖g‖ of half precision, which takes no copy; infinite where g² overflow."""
    flat = grad.reshape(-1)
    if flat.dtype is wide_dtype(flat):
        return torch.dot(flat, flat)
    return torch.linalg.vector_norm(flat, dtype=wide_dtype(flat))


def _largest(grad: Tensor) -> Tensor:
    """max |g| of float16, as an infinite number where its square overflows in float16."""
    if not grad.numel():
        return grad.new_zeros(())
    largest = grad.abs().amax().float()
    return torch.where(largest <= FLOAT16_ROOT, largest, largest * torch.inf)


def _has_narrow_state(group: Group) -> bool:
    """Whether moments are in the dtype of the gradients."""
    return group.get("state_dtype", torch.float32) is None


def _what_is_wrong(groups: Sequence[Group], squares: Squares) -> str:
    """Which gradients are not finite or too large, by name."""
    nonfinite, huge = [], []
    for group in groups:
        for i, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            grad = local(param.grad)
            narrow = _has_narrow_state(group) and grad.dtype is torch.float16
            if not bool(grad.isfinite().all()):
                nonfinite.append(param_name(group, i))
            elif squares(param, group) and not bool(
                (_largest if narrow else _size)(grad).isfinite()
            ):
                huge.append(f"{param_name(group, i)} ({float(grad.abs().max()):.3g})")
    texts = []
    if nonfinite:
        texts.append(f"non-finite gradient of parameter {', '.join(nonfinite)}")
    if huge:
        texts.append(f"gradient too large to be squared, of parameter {', '.join(huge)}")
    return "; ".join(texts)


# A step that fails in the middle, as for want of memory, has moved some parameters only.


class Stepping(Protocol):
    """An optimizer; `step_error` is the error that ended a step, "" if none did."""

    step_error: str


@contextmanager
def noting_errors(optimizer: Stepping) -> Iterator[None]:
    """Remember an error: parameters and state are then of two different steps."""
    try:
        yield
    except KeyboardInterrupt:  # whoever stops a run by hand may want to save it
        logger.warning(
            "%s was interrupted in the middle of a step: some parameters have moved, others not",
            type(optimizer).__name__,
        )
        raise
    except Exception as error:
        optimizer.step_error = f"{type(error).__name__}: {error}"
        raise


def refuse_after_error(optimizer: Stepping) -> None:
    """Raise if a step has failed since the optimizer was made or a state was loaded."""
    if optimizer.step_error:
        raise RuntimeError(
            f"{type(optimizer).__name__}: a step failed in the middle ({optimizer.step_error}), so "
            "that parameters and state are of two different steps; load the model and "
            "optimizer.load_state_dict() from before it, or make both anew"
        )
