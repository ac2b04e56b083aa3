"""A machine where a bfloat16 matrix product is an illegal instruction, for Python processes that
have this folder on PYTHONPATH:

    PYTHONPATH=tests/illegal_bfloat16 make test

As on the real ones, ONEDNN_MAX_CPU_ISA, set before torch is imported, avoids it;
ILLEGAL_BFLOAT16=1 makes it not help.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import signal
import sys

PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__", "linear")


def deadly(product):
    @functools.wraps(product)
    def multiply(*args, **kwargs):
        if any(getattr(arg, "is_cpu", False) and "bfloat16" in str(arg.dtype) for arg in args):
            os.kill(os.getpid(), signal.SIGILL)
        return product(*args, **kwargs)

    return multiply


class TorchFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as Python would, and replaces its matrix products once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        avoided = "ONEDNN_MAX_CPU_ISA" in os.environ and "ILLEGAL_BFLOAT16" not in os.environ
        self.loader.exec_module(module)
        if avoided:
            return
        for holder in (module, module.Tensor, module.nn.functional):
            for name in PRODUCTS:
                if hasattr(holder, name):
                    setattr(holder, name, deadly(getattr(holder, name)))


sys.meta_path.insert(0, TorchFinder())
