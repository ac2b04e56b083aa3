"""A second device on a machine without a GPU: tensors say `npu:0` and are computed on the CPU.

It is torch's Python backend for privateuse1. As on CUDA, an operation that mixes these tensors with
tensors of the CPU raises (scalars aside). `stalls` lists what would make the stepping thread wait
for a GPU: reading a value on the host, a copy in either direction that is not `non_blocking`, and
operations whose result has a shape that depends on values.
"""

import threading
from contextlib import contextmanager

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "npu"
aten = torch.ops.aten
stalls: list[str] = []
VALUE_SHAPED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


def stall(what: str) -> None:
    """Count it if the main thread waits: a refresh on another thread has a stream of its own."""
    if threading.current_thread() is threading.main_thread():
        stalls.append(what)


class DeviceTensor(torch.Tensor):
    """`raw`: the tensor on the CPU that holds the values."""

    @staticmethod
    def __new__(cls, raw, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=f"{NAME}:0",
            requires_grad=requires_grad,
        )

    def __init__(self, raw, requires_grad=False):
        self.raw = raw

    def __repr__(self):
        return f"{NAME}({self.raw})"

    def __deepcopy__(self, memo):
        made = memo[id(self)] = _restored(self.raw.clone(), *_is_parameter(self))
        if self.grad is not None:
            made.grad = self.grad.__deepcopy__(memo)
        return made

    def __reduce_ex__(self, protocol):
        return _restored, (self.raw.detach(), *_is_parameter(self))

    def tolist(self):
        stall("tolist")
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is aten._to_copy.default:
            return _converted(args[0], **kwargs)
        if func is aten.copy_.default:
            return _copied(args[0], args[1], *args[2:], **kwargs)
        _count(func, args)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == NAME:
            kwargs["device"] = "cpu"
        raw_kwargs = {key: _raw(value, func) for key, value in kwargs.items()}
        result = func(*[_raw(value, func) for value in args], **raw_kwargs)
        # in place: the same tensor comes back; __and__ and the like are not
        if func._schema.is_mutable and isinstance(args[0], cls) and result is args[0].raw:
            return args[0]
        return _wrapped(result)


def _is_parameter(tensor):
    return tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)


def _restored(raw, requires_grad, parameter):
    """A copy, or what was saved, on the device again."""
    tensor = DeviceTensor(raw.detach(), requires_grad)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor


def _raw(value, func=None):
    """The tensors on the CPU behind an argument; `func` does not take others from there."""
    if isinstance(value, DeviceTensor):
        return value.raw
    if isinstance(value, list | tuple):
        return [_raw(each, func) for each in value]
    if func is not None and isinstance(value, torch.Tensor) and value.dim() > 0:
        raise RuntimeError(f"{func}: expected all tensors on {NAME}:0, found one on the CPU")
    return value


def _wrapped(result):
    if isinstance(result, list | tuple):
        return type(result)(map(_wrapped, result))
    return DeviceTensor(result) if isinstance(result, torch.Tensor) else result


def _converted(source, device=None, non_blocking=False, **settings):
    """`source.to(device, …)`, which may cross from one device to the other."""
    here = isinstance(source, DeviceTensor)
    stays = here if device is None else torch.device(device).type == NAME
    _check_race(non_blocking and here and not stays)
    if here != stays and not (non_blocking and stays):
        stall("to the device" if stays else "to the host")
    result = aten._to_copy.default(_raw(source), **settings)
    return DeviceTensor(result) if stays else result


def _copied(target, source, non_blocking=False):
    here = isinstance(target, DeviceTensor)
    _check_race(non_blocking and not here)
    if here != isinstance(source, DeviceTensor) and not (non_blocking and here):
        stall("copy to the device" if here else "copy to the host")
    aten.copy_.default(_raw(target), _raw(source))
    return target


def _check_race(racing):
    if racing:
        raise RuntimeError("a copy to the host with non_blocking=True may be read too early")


def _count(func, args):
    name = func._schema.name.removeprefix("aten::")
    by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
        index is not None and index.dtype is torch.bool for index in args[1]
    )
    if name == "_local_scalar_dense":
        stall("item")
    elif by_mask or name in VALUE_SHAPED:
        stall(f"shape of {name}")


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return DeviceTensor(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source, target, non_blocking=False):
    """torch.tensor(values, device=...) fills its result by it."""
    return _copied(target, source, non_blocking)


_setup_privateuseone_for_python_backend(NAME)
# autograd's own threads would abort at exit; an error in a backward pass ends the process even so
torch.autograd.set_multithreading_enabled(False)
torch.serialization.add_safe_globals([_restored])
_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")


@contextmanager
def counted():
    """The list of stalls within the context."""
    before = len(stalls)
    found: list[str] = []
    yield found
    found += stalls[before:]
