"""Transfers between host and device that wait for the device as rarely as possible."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor


def surely_all(condition: Tensor) -> bool:
    """Whether all entries are true, if that is known without a device sync; otherwise False.

    Only for shortcuts: callers must also be right when the answer is False.
    """
    return condition.device.type == "cpu" and bool(condition.all())


def as_tensor(value: Any) -> Tensor:
    """A tensor itself, a number on the host; torch.as_tensor moves both to the default device."""
    return value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, by an asynchronous copy unless the target is the host."""
    # the host could read an asynchronous copy before it has arrived
    return tensor.to(device, non_blocking=device.type != "cpu")


def on_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The values of each tensor, flattened, with one device sync per device."""
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    values: list[list[float]] = [[] for _ in tensors]
    for indices in by_device.values():
        joined = iter(torch.cat([tensors[i].reshape(-1).double() for i in indices]).tolist())
        for i in indices:
            values[i] = list(islice(joined, tensors[i].numel()))
    return values
