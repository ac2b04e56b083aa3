"""AdamW on lists of tensors: in C on the CPU, by Triton on CUDA, and else by torch's operator.

Each is used where it is there and has shown to give the bits of torch.optim.AdamW(fused=True).
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from isokron.kernels.adamw_native import Lists, Pointers, Tensors
from isokron.kernels.native import core_setter
from isokron.kernels.trust import trusted

# Elements below which torch's operator is quicker on one thread: it wakes all of them a tensor.
SMALL = 1 << 14
# What the Triton kernel can take as parameters and gradients, each list of one kind.
NARROW = ({torch.float32}, {torch.bfloat16})


class Table:
    """What stays the same from step to step of the same lists, so that a step need not make it."""

    def __init__(self) -> None:
        self.pointers = Pointers()  # for C
        self.plain: Lists = ()  # state that has been seen to be contiguous
        self.sizes: tuple[Tensors, list[int], list[int]] = ((), [], [])
        self.counted: tuple[Tensor | None, int, float] = (None, 0, 0.0)

    def fits(self, lists: Lists) -> bool:
        """Whether C can step the lists as they are; see Pointers."""
        return self.pointers.fits(lists)

    def count(self, step: Tensor) -> float:
        """The number on a device that has just been raised by one, without waiting for it."""
        known, version, number = self.counted
        followed = known is step and step._version == version + 1  # nothing else was done to it
        self.counted = (step, step._version, number + 1 if followed else float(step))
        return self.counted[2]

    def small_and_large(self, params: Tensors) -> tuple[list[int], list[int]]:
        """The numbers of the tensors that are below SMALL, and of the others."""
        if self.sizes[0] is not params or isinstance(params, list):
            large = [i for i, param in enumerate(params) if param.numel() >= SMALL]
            small = [i for i, param in enumerate(params) if param.numel() < SMALL]
            self.sizes = (params, small, large)
        return self.sizes[1:]


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
    table: Table | None = None,
) -> bool:
    """One step; `max_exp_avg_sqs` empty: no amsgrad. `steps` count this step too.

    False, and nothing has changed, unless all tensors of a parameter have one device, dtype and
    order of elements in memory, dense: kernels ignore strides. `table`: kept by callers that step
    the same lists again and again.
    """
    table = table or Table()
    lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps)
    lengths = [len(tensors) for tensors in lists]
    if {*lengths[:4], lengths[5]} != {lengths[0]} or lengths[4] not in (0, lengths[0]):
        raise ValueError(
            f"adamw_: the lists must be of one length (max_exp_avg_sqs may be empty), got {lengths}"
        )
    if not params:
        return True
    rates = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    if table.pointers.step(lists, lr=lr, maximize=maximize, **rates):
        return True
    if params[0].is_cuda and _by_triton(table, lists, lr=lr, maximize=maximize, **rates):
        return True
    if not _alike(table, lists):
        return False
    _by_torch(table, lists, lr=lr, amsgrad=bool(max_exp_avg_sqs), maximize=maximize, **rates)
    return True


def _alike(table: Table, lists: Lists) -> bool:
    """Whether the tensors of each parameter are of one dtype and lie in memory in one order."""
    dtype = lists[0][0].dtype
    stepped = [tensors for tensors in lists[:-1] if tensors]
    state = [tensors for tensors in stepped[2:] if isinstance(tensors, tuple)]
    known = len(state) == len(table.plain) > 0 and all(map(is_, state, table.plain))
    asked = stepped[:2] if known else stepped
    if any({tensor.dtype for tensor in tensors} != {dtype} for tensors in asked):
        return False
    sizes = list(map(Tensor.numel, stepped[2]))
    if any(list(map(Tensor.numel, tensors)) != sizes for tensors in asked):
        return False
    if all(all(map(Tensor.is_contiguous, tensors)) for tensors in asked):
        table.plain = state if len(state) == len(stepped) - 2 else ()
        return True
    return all(
        len({(tensor.shape, tensor.stride()) for tensor in row}) == 1 and _dense(row[0])
        for row in zip(*stepped, strict=True)
    )


def _dense(tensor: Tensor) -> bool:
    span = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return span + 1 == tensor.numel()


def _by_triton(table: Table, lists: Lists, *, lr: float | Tensor, **settings: Any) -> bool:
    """One launch for all, if the kernel can take them; it reads half-precision parameters too."""
    params, grads, *_, steps = lists
    capturing = params[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or isinstance(lr, Tensor):  # a number on the device is not to be waited for
        return False
    if any(step is not steps[0] for step in steps) or not trusted("adamw", params[0].device)[0]:
        return False
    stepped = [tensors for tensors in lists[:-1] if tensors]
    wide = all(tensor.dtype is torch.float32 for tensors in stepped[2:] for tensor in tensors)
    dense = all(tensor.is_contiguous() for tensors in stepped for tensor in tensors)
    kinds = [{tensor.dtype for tensor in tensors} for tensors in (params, grads)]
    if not (wide and dense and kinds[0] in NARROW and kinds[1] in NARROW):
        return False
    from isokron.kernels.triton_adamw import adamw_

    adamw_(*stepped, step=table.count(steps[0]), lr=lr, amsgrad=len(stepped) > 4, **settings)
    return True


def _by_torch(table: Table, lists: Lists, **settings: Any) -> None:
    params = lists[0]
    threads = torch.get_num_threads()
    limit = (
        core_setter("omp_set_num_threads")
        if params[0].device.type == "cpu" and threads > 1
        else None
    )
    small, large = table.small_and_large(params) if limit and len(params) > 1 else ([], [])
    if not limit or not small:
        torch._fused_adamw_(*lists, **settings)
        return
    limit(1)  # of the calling thread; the bits do not depend on it
    try:
        few = [_pick(tensors, small) for tensors in lists]
        torch._fused_adamw_(*few, **settings)
    finally:
        limit(threads)
    if large:
        rest = [_pick(tensors, large) for tensors in lists]
        torch._fused_adamw_(*rest, **settings)


def _pick(tensors: Tensors, rows: Sequence[int]) -> Tensors:
    return tensors if len(rows) == len(tensors) else [tensors[i] for i in rows] if tensors else []
