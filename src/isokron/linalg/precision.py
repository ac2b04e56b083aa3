"""Products in the precision of their tensors, whatever autocast and TF32 do to a model's products.

Autocast is of a thread. The precision of float32 products (`torch.set_float32_matmul_precision`,
`torch.backends.fp32_precision` and those of its backends) is of the process: it is switched while
any thread is within `full_precision()`, and put back when the last one has left.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

OPERATIONS = (("cuda", "matmul"), ("mkldnn", "matmul"))
PER_BACKEND = hasattr(torch._C, "_get_fp32_precision_getter")  # since torch 2.9; one for all before


def full_precision() -> AbstractContextManager[Any]:
    """A context in which autocast is off and products of float32 tensors are in float32."""
    if _switch.depth == 0 and not torch._C._is_any_autocast_enabled() and not _reduced():
        return nullcontext()
    return _without_autocast()


def is_switched() -> bool:
    """Whether the precision of the process is another one than the user has set."""
    return _switch.depth > 0


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, _autocast_devices()):
            stack.enter_context(torch.autocast(device, enabled=False))
        if _switch.depth or _reduced():
            stack.enter_context(_switch)
        yield


def _autocast_devices() -> list[str]:
    if PER_BACKEND:
        return torch._C._autocast_supported_devices()
    return ["cpu", "cuda", "xpu", "hpu", "mps", "xla", "privateuseone"]


def _get(*operation: str) -> str:
    if PER_BACKEND:
        return torch._C._get_fp32_precision_getter(*operation)
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _set(*operation: str) -> None:
    if PER_BACKEND:
        torch._C._set_fp32_precision_setter(*operation)


def _reduced() -> bool:
    return any(_get(*operation) not in ("none", "ieee") for operation in OPERATIONS)


class _Switch:
    """float32 products are in float32 as long as any thread is within."""

    def __init__(self) -> None:
        self.lock, self.depth = threading.Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            if self.depth == 0:
                self.precisions = [_get(*operation) for operation in OPERATIONS]
                try:
                    self.name = torch.get_float32_matmul_precision()
                except RuntimeError:  # backends differ, for which the older setting has no name
                    self.name = "highest"
                # by the older setting, with which torch.compile would find the newer at odds
                torch.set_float32_matmul_precision("highest")
            self.depth += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            if self.depth == 1:
                torch.set_float32_matmul_precision(self.name)
                for operation, precision in zip(OPERATIONS, self.precisions, strict=True):
                    _set(*operation, "none")  # as the backend or the process has it, if it was so
                    if _get(*operation) != precision:
                        _set(*operation, precision)
            self.depth -= 1


_switch = _Switch()
