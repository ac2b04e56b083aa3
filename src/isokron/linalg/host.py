"""Between host and device: what is known without waiting, and what has to be waited for."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def surely_all(condition: Tensor) -> bool:
    """Whether all are true, where that is known without waiting for a device; False elsewhere.

    For shortcuts: what is done without one must be right whatever the answer.
    """
    return condition.device.type == "cpu" and bool(condition.all())


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for that device.

    A copy to the host is waited for: it could be read before it has arrived.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def on_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The values of tensors, flat; waits once for a device, however many tensors it has."""
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    values: list[list[float]] = [[] for _ in tensors]
    for numbers in by_device.values():
        joined = torch.cat([tensors[i].reshape(-1).double() for i in numbers]).tolist()
        ends = list(accumulate(tensors[i].numel() for i in numbers))
        for i, start, end in zip(numbers, [0, *ends], ends, strict=False):
            values[i] = joined[start:end]
    return values
