"""The machine code of a Triton launch, compiled for a GPU that need not be present."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime.jit import JITFunction

TOOLS = Path(nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class Machine:
    """One kernel on one architecture: its PTX, its instructions and what it occupies."""

    ptx: str
    sass: str
    registers: int
    stack: int
    shared: int

    def count(self, instruction: str) -> int:
        """Occurrences of an instruction in the machine code; `LDG` includes its variants."""
        return len(re.findall(rf"\b{re.escape(instruction)}(?![A-Z0-9])", self.sass))

    def float32(self, operation: str) -> int:
        """Float32 operations in the PTX, a packed pair being two: `mul` any, `mul.rn` some."""
        matches = re.findall(rf"\b{re.escape(operation)}\.(?:\w+\.)*f32(x2)?\s", self.ptx)
        return sum(2 if packed else 1 for packed in matches)

    @property
    def spills(self) -> int:
        return self.stack + self.count("LDL") + self.count("STL")


@dataclass(frozen=True)
class AbsentGPU:
    """The part of a driver that Triton needs before a launch."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches kernels by device: one per architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def machine_code(call: Callable[[], object], capability: int, folder: Path) -> Machine:
    """The one kernel that `call` launches, on CPU tensors, compiled for sm_`capability` instead.

    The signature (types, alignment, strides of one) is therefore that of a real launch.
    """
    built: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        built.append(run(kernel, *args, grid=grid, warmup=True, **kwargs))

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(triton.runtime.driver, "_active", AbsentGPU(capability)),
    ):
        call()
    (kernel,) = built
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = tool("cuobjdump", "-res-usage", str(cubin))
    registers, stack = (int(re.findall(rf"{key}:(\d+)", usage)[0]) for key in ("REG", "STACK"))
    sass = tool("nvdisasm", "-c", str(cubin))
    return Machine(kernel.asm["ptx"], sass, registers, stack, kernel.metadata.shared)


def tool(name: str, *arguments: str) -> str:
    """The output of a binary utility from the Triton wheel."""
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
