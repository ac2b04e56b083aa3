"""AdamW in C: where the compiled code is, and what it is told about a list of tensors."""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from itertools import product
from operator import is_
from typing import Any

import torch
from torch import Tensor

from isokron.kernels.native import Native, Unavailable, torch_symbols

Tensors = list[Tensor] | tuple[Tensor, ...]
Lists = Sequence[Tensors]

# The lists of one step, in the order of adamw.c.
KINDS = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
CODES = {torch.float32: 6, torch.float64: 7}  # torch's numbers for what adamw.c can do
# what it asks torch's stable C interface about a tensor
QUERIES = ("get_data_ptr", "get_dim", "get_sizes", "get_strides", "get_dtype", "get_device_type")
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class _List(ctypes.Structure):
    """`struct list` of adamw.c."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("tensors", ctypes.c_void_p * len(KINDS)),
        ("inside", ctypes.c_int64),
        ("data", ctypes.c_void_p * len(KINDS)),
        ("length", ctypes.c_void_p),
        ("known", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")),
        ("maximize", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (*OPENMP, *QUERIES)),
    )


class Pointers:
    """What stays the same from step to step of the same lists, so that a step need not make it.

    That is which tensors there are; the C code asks all of them where and how their elements lie,
    every time. Gradients are not kept: their memory could not be used again.
    """

    def __init__(self) -> None:
        self.kept: list[Tensors] = [()] * len(KINDS)
        self.arrays: list[array[int]] = [array("Q")] * len(KINDS)
        self.struct = _List()
        self.fitted: Lists = ()

    def fits(self, lists: Lists) -> bool:
        """Whether C can step the lists: it is there, and finds all layouts as it needs them.

        Of gradients that are not there to be stepped on, such as sparse ones, the answer is no. It
        holds until the next step of the same lists, or the next question.
        """
        library = library_for(lists[0][0])
        return library is not None and self._fits(library, lists)

    def _fits(self, library: ctypes.CDLL, lists: Lists) -> bool:
        self._point(lists)
        code = CODES[lists[0][0].dtype]
        fits = bool(library.isokron_adamw_fits(ctypes.byref(self.struct), code))
        self.fitted = lists if fits else ()
        return fits

    def _step(self, library: ctypes.CDLL, *, lr: float | Tensor, **settings: float) -> None:
        """Step the lists that were found to fit."""
        self.struct.lr = float(lr)
        for name, value in settings.items():
            setattr(self.struct, name, value)
        self.struct.threads = torch.get_num_threads()
        library.isokron_adamw(ctypes.byref(self.struct), CODES[self.fitted[0][0].dtype])
        self.fitted = ()

    def step(self, lists: Lists, **settings: Any) -> bool:
        """Step by C if it can; False, and nothing changed, if not."""
        known = len(self.fitted) == len(lists) and all(map(is_, self.fitted, lists))
        if not known and not self.fits(lists):
            return False
        library = library_for(lists[0][0])
        if library is not None:
            self._step(library, **settings)
        return library is not None

    def _point(self, lists: Lists) -> None:
        count = len(lists[0])
        if self.struct.count != count:
            self.room = array("Q", bytes(8 * count * (len(KINDS) + 1)))
            start = self.room.buffer_info()[0]
            addresses = [start + 8 * count * i for i in range(len(KINDS) + 1)]
            self.struct = _List(count=count, length=addresses[-1], inside=_inside(), **_functions())
            self.struct.data[:] = addresses[:-1]
            self.kept = [()] * len(KINDS)
        for i, tensors in enumerate(lists):
            if KINDS[i] != "grad":
                # a tuple that is the same holds the same; a list may have changed
                old = self.kept[i]
                if old is tensors and isinstance(tensors, tuple):
                    continue
                if len(old) == len(tensors) and all(map(is_, old, tensors)):
                    continue
                self.kept[i] = tuple(tensors)  # itself, if it is one
                self.struct.known = False
            self.arrays[i] = array("Q", map(id, tensors))
            self.struct.tensors[i] = self.arrays[i].buffer_info()[0] if tensors else None


def library_for(tensor: Tensor) -> ctypes.CDLL | None:
    """The compiled code, if it is for tensors like this one and can be had."""
    return NATIVE.library() if tensor.device.type == "cpu" and tensor.dtype in CODES else None


def status() -> tuple[str, str]:
    """Whether AdamW on the CPU is "native" or "torch", and why."""
    return NATIVE.status()


@functools.cache
def _functions() -> dict[str, int]:
    """What adamw.c calls: torch's threads, and torch's C interface to its tensors."""
    named = {name: f"aoti_torch_{name}" for name in QUERIES}
    addresses = torch_symbols([*OPENMP, *named.values()])
    return {name: addresses[named.get(name, name)] for name in (*OPENMP, *QUERIES)}


@functools.cache
def _inside() -> int:
    """Where in a Python tensor torch's own one is: an at::Tensor, which is one pointer.

    Python is the only one to know all tensors by address, and asking each for `_cdata` is slow.
    """
    one, other = torch.empty(0, device="cpu"), torch.nn.Parameter(torch.empty(0, device="cpu"))
    for offset in range(0, object.__basicsize__ + 32, 8):
        found = [ctypes.c_uint64.from_address(id(t) + offset).value for t in (one, other)]
        if found == [one._cdata, other._cdata]:
            return offset
    raise Unavailable("Python's tensors are not laid out as expected")


def _defines() -> list[str]:
    """How many elements torch takes at a time here, and whether its compiler fused operations."""
    capability = torch.backends.cpu.get_cpu_capability()
    width = {"AVX512": 16, "AVX2": 8}.get(capability, 8)
    return [f"-DWIDTH={width}", f"-DFUSED={int(capability != 'DEFAULT')}"]


def _check(library: ctypes.CDLL) -> None:
    """Compare bits with torch's operator: every remainder, every branch, one thread and several."""
    library.isokron_adamw_fits.restype = ctypes.c_int64
    generator = torch.Generator().manual_seed(0)
    lengths = [*range(68), 50_005]

    def drawn(dtype: torch.dtype, power: int = 1) -> list[Tensor]:
        noise = torch.randn(sum(lengths), generator=generator, device="cpu", dtype=dtype)
        return list(noise.pow_(power).split(lengths))

    betas = [(0.9, 0.999, False), (0.9, 0.99, True), (0.3, 0.5, False), (0.0, 0.0, True)]
    for dtype, (number, (beta1, beta2, amsgrad)) in product(CODES, enumerate(betas)):
        lists = [*(drawn(dtype) for _ in range(3)), drawn(dtype, 2)]
        lists.append(drawn(dtype, 2) if amsgrad else [])
        counts = [
            torch.tensor(1.0 + 7 * number + odd, device="cpu", dtype=torch.float32)
            for odd in range(2)
        ]
        lists.append([counts[i % 2] for i in range(len(lengths))])
        copies = [[tensor.clone() for tensor in tensors] for tensors in lists]
        settings: dict[str, Any] = {"lr": 0.1, "beta1": beta1, "beta2": beta2, "eps": 1e-8}
        settings |= {"weight_decay": 0.1 * (number % 2), "maximize": number > 1}
        torch._fused_adamw_(*copies, amsgrad=amsgrad, **settings)
        pointers = Pointers()
        if not pointers._fits(library, lists):
            raise Unavailable("compiled, but it does not find torch's tensors")
        pointers._step(library, **settings)
        for mine, theirs in zip(lists, copies, strict=True):
            if not all(map(torch.equal, mine, theirs)):
                capability = torch.backends.cpu.get_cpu_capability()
                raise Unavailable(f"compiled, but its bits are not torch's on {capability}")


NATIVE = Native("adamw.c", _check, _defines)
