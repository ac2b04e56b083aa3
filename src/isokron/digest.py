"""Digests of values: tensors in any nesting, objects by their fields, functions by their code.

Equal digests mean equal values, in any process and on any machine; lists count as tuples. What has
no content that can be read, such as an open file, is refused by name; `repr` is never used, since
it leaves out the middle of large arrays and contains addresses.
"""

import array
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

PLAIN = (str, int, float, complex, bool, type(None), types.EllipsisType)
# model → (stamp, digest)
_weights: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()


def hash_of(value: Any) -> str:
    """SHA-256 of a value; see `update_hash`."""
    total = hashlib.sha256()
    update_hash(total, value)
    return total.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """The digest of a model's state dict, computed again only if a tensor of it has changed."""
    stamp = _stamp(model)
    if model not in _weights or _weights[model][0] != stamp:
        # torch.compile changes names, not weights
        state = {name.replace("_orig_mod.", ""): x for name, x in model.state_dict().items()}
        _weights[model] = stamp, hash_of(state)[:16]
    return _weights[model][1]


def _stamp(model: nn.Module) -> list[Any]:
    """What changes with the weights of a model, which are read once, as in a forward pass."""
    tensors = chain(model.parameters(), model.buffers())
    # inference tensors count no versions
    return [
        (t.data_ptr(), t.device, None if t.is_inference() else t._version, _sum(t)) for t in tensors
    ]


def _sum(tensor: Tensor) -> tuple[int, list[int]]:
    """The sum of a tensor's bytes by eight, and the last ones: changes through .data, and by
    kernels that write to memory, raise no version."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    size = len(flat) // 8 * 8
    return int(flat[:size].view(torch.int64).sum()), flat[size:].tolist()


def update_hash(total: Any, value: Any, inside: tuple[int, ...] = ()) -> None:
    """Add a value to a hash. inside: the ids of the objects that contain it."""
    if isinstance(value, PLAIN):
        total.update(f"{type(value).__name__} {value!r};".encode())
        return
    if id(value) in inside:
        total.update(f"cycle {len(inside) - inside.index(id(value))};".encode())
        return
    if isinstance(value, Tensor):
        total.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        flat = value.detach().cpu().contiguous().flatten()
        total.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, bytes | bytearray | memoryview | array.array):
        total.update(f"{type(value).__name__} {len(value)} ".encode())
        total.update(value)
    elif _is_array(value):
        total.update(f"numpy {value.dtype.str} {value.dtype} {value.shape} ".encode())
        total.update(value.tobytes())
    else:
        kind, parts = _parts(value)
        total.update(f"{kind} {len(parts)}(".encode())
        for part in parts:
            update_hash(total, part, (*inside, id(value)))


def _is_array(value: Any) -> bool:
    """Whether a value is an array or a number of numpy, but not one of objects."""
    dtype: Any = getattr(value, "dtype", None)
    is_numpy = hasattr(value, "tobytes") and dtype is not None and not isinstance(value, type)
    return is_numpy and not dtype.hasobject


def _parts(value: Any) -> tuple[str, list[Any]]:
    """The kind of a value that has parts, and these."""
    if isinstance(value, Mapping):
        return "mapping", [part for item in value.items() for part in item]
    if isinstance(value, tuple | list):
        # subclasses may have fields
        return "sequence", [*value, *([vars(value)] if getattr(value, "__dict__", None) else [])]
    if isinstance(value, set | frozenset):
        return "set", sorted(hash_of(part) for part in value)
    if isinstance(value, torch.Generator):
        return "generator", [value.get_state()]
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | torch.dtype):
        return _name(value), []
    if isinstance(value, torch.device):
        return str(value), []
    if isinstance(value, types.MethodType):
        return "method", [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return "partial", [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        return _name(value), list(_code(value))
    if isinstance(value, nn.Module):
        kinds = [(name, _name(type(module))) for name, module in value.named_modules()]
        return "model", [kinds, value.state_dict()]
    return _name(type(value)), _fields(value)


def _name(value: Any) -> str:
    module = getattr(value, "__module__", "")
    return f"{module}.{getattr(value, '__qualname__', getattr(value, '__name__', value))}"


def _fields(value: Any) -> list[Any]:
    """What an object would be pickled by: the arguments it is made of, its fields and items."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        raise TypeError(
            f"a {_name(type(value))} has no digest: {error}; replace it by its content, such as "
            "tensors, numbers, strings, or objects of these"
        ) from None
    if isinstance(reduced, str):
        return [reduced]
    _, arguments, *more = reduced
    # items come as iterators
    state, *items = [*more, None, None, None][:3]
    return [arguments, state, *(None if part is None else list(part) for part in items)]


def class_code(value: Any) -> Any:
    """The source of a class and what its methods use; other values as they are."""
    if not isinstance(value, type):
        return value
    methods = [part for part in vars(value).values() if isinstance(part, types.FunctionType)]
    return [value, _source(value), *(list(_globals(method)) for method in methods)]


def _code(function: types.FunctionType) -> Iterator[Any]:
    """The source of a function, and the values and functions beside it that it uses."""
    code = function.__code__
    bytecode = code.co_code, [const for const in code.co_consts if isinstance(const, PLAIN)]
    if not _is_ours(function):
        yield _source(function) or bytecode
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
    yield from _globals(function)


def _globals(function: types.FunctionType) -> Iterator[Any]:
    """Names and values of its file's constants, functions and classes that a function uses."""
    for name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
        value = function.__globals__[name]
        # functions and classes of other files are those of a library
        near = getattr(value, "__module__", None) == function.__module__
        if near and isinstance(value, type):
            yield name, _source(value)
        elif isinstance(value, (*PLAIN, tuple, list, dict)) or (
            near and isinstance(value, types.FunctionType)
        ):
            yield name, value


def _global_names(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_global_names, inner))


def _source(value: Any) -> str:
    if not _is_ours(value):
        with suppress(OSError, TypeError):
            return inspect.getsource(value)
    return ""


def _is_ours(value: Any) -> bool:
    """Whether a function or class is this library's, and known by its name in all versions."""
    return str(value.__module__).startswith("isokron.")
