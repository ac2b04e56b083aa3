"""AdamW on lists of tensors, by Triton on CUDA if verified, otherwise by torch's fused operator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.kernels.verify import verified

Tensors = list[Tensor] | tuple[Tensor, ...]
Lists = Sequence[Tensors]


class StepCount:
    """The value of a step counter on a device, without reading it in every step."""

    def __init__(self) -> None:
        self.counter: Tensor | None = None
        self.version = 0
        self.value = 0.0

    def after_increment(self, counter: Tensor) -> float:
        """The value of a counter that has just been incremented by one."""
        # the version tells whether anything else wrote to the counter since the last call
        unchanged = self.counter is counter and counter._version == self.version + 1
        self.value = self.value + 1 if unchanged else float(counter)
        self.counter, self.version = counter, counter._version
        return self.value


def adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool = False,
    count: StepCount | None = None,
) -> bool:
    """One AdamW step in place, under torch.optim.AdamW's names for lists and settings.

    Returns False and changes nothing unless all tensors of a parameter have the same device, dtype
    and dense memory layout, because the fused kernels ignore strides.

    Args:
        max_exp_avg_sqs: empty without amsgrad.
        steps: step counters, already incremented for this step.
        count: kept by callers that step the same lists repeatedly, so that a counter on a device is
            read only once.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps)
    lengths = [len(tensors) for tensors in lists]
    if {*lengths[:4], lengths[5]} != {lengths[0]} or lengths[4] not in (0, lengths[0]):
        raise ValueError(
            f"adamw_: the lists must be of one length (max_exp_avg_sqs may be empty), got {lengths}"
        )
    if not params:
        return True
    settings: dict[str, Any] = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
        "eps": eps,
        "amsgrad": bool(max_exp_avg_sqs),
        "maximize": maximize,
    }
    if params[0].is_cuda and _by_triton(count or StepCount(), lists, **settings):
        return True
    if not _same_layout(lists):
        return False
    torch._fused_adamw_(*lists, **settings)
    return True


def _same_layout(lists: Lists) -> bool:
    """Whether the tensors of each parameter have one dtype and one dense memory layout."""
    dtype = lists[0][0].dtype
    updated = [tensors for tensors in lists[:-1] if tensors]
    if any({tensor.dtype for tensor in tensors} != {dtype} for tensors in updated):
        return False
    sizes = list(map(Tensor.numel, updated[0]))
    if any(list(map(Tensor.numel, tensors)) != sizes for tensors in updated):
        return False
    # the common case first: over many small tensors, Python takes most of a step
    if all(all(map(Tensor.is_contiguous, tensors)) for tensors in updated):
        return True
    return all(
        len({(tensor.shape, tensor.stride()) for tensor in row}) == 1 and _dense(row[0])
        for row in zip(*updated, strict=True)
    )


def _dense(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in pairs) + 1 == tensor.numel()


def _by_triton(count: StepCount, lists: Lists, *, lr: float | Tensor, **settings: Any) -> bool:
    """One launch for all tensors; False if the kernel cannot take them."""
    params, *_, steps = lists
    capturing = params[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or isinstance(lr, Tensor):  # reading a number on the device would wait for it
        return False
    if any(step is not steps[0] for step in steps) or not verified("adamw", params[0].device)[0]:
        return False
    from isokron.kernels.triton_adamw import adamw_, rejection

    updated = [tensors for tensors in lists[:-1] if tensors]
    if rejection(updated):
        return False
    adamw_(*updated, step=count.after_increment(steps[0]), lr=lr, **settings)
    return True
