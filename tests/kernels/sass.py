"""What a Triton kernel becomes: compiled for a GPU that need not be there, and disassembled."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

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
        """How often an instruction stands in the machine code; `LDG` is any of its variants."""
        return len(re.findall(rf"\b{re.escape(instruction)}(?![A-Z0-9])", self.sass))

    def float32(self, operation: str) -> int:
        """Float32 operations in the PTX, a packed pair being two: `mul` any, `mul.rn` some."""
        found = re.findall(rf"\b{re.escape(operation)}\.(?:\w+\.)*f32(x2)?\s", self.ptx)
        return sum(2 if packed else 1 for packed in found)

    @property
    def spills(self) -> int:
        return self.stack + self.count("LDL") + self.count("STL")


def machine_code(
    kernel: Any,
    capability: int,
    signature: Mapping[str, str | tuple[str, ...]],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    multiples_of_16: Sequence[str],
    folder: Path,
) -> Machine:
    """Compile for sm_`capability`, as a launch would that found what `multiples_of_16` says.

    A tuple in `signature` is strides of which the last is one, and the others such multiples.
    """
    names = kernel.arg_names
    types: dict[str, Any] = {**signature, **dict.fromkeys(constants, "constexpr")}
    fixed: dict[tuple[int, ...], Any] = {(names.index(k),): v for k, v in constants.items()}
    hint = [["tt.divisibility", 16]]
    hints = {(names.index(name),): hint for name in multiples_of_16}
    for name, kinds in signature.items():
        if isinstance(kinds, tuple):
            last = len(kinds) - 1
            fixed[names.index(name), last] = 1
            hints |= {(names.index(name), i): hint for i in range(last)}
            types[name] = (*kinds[:last], "constexpr")
    built = triton.compile(
        ASTSource(kernel, types, fixed, hints),
        target=GPUTarget("cuda", capability, 32),
        options=dict(options),
    )
    cubin = folder / f"{kernel.__name__}.cubin"
    cubin.write_bytes(built.asm["cubin"])
    usage = tool("cuobjdump", "-res-usage", str(cubin))
    registers, stack = (int(re.findall(rf"{key}:(\d+)", usage)[0]) for key in ("REG", "STACK"))
    sass = tool("nvdisasm", "-c", str(cubin))
    return Machine(built.asm["ptx"], sass, registers, stack, built.metadata.shared)


def tool(name: str, *arguments: str) -> str:
    """The output of a binary utility that the wheel brings along."""
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
