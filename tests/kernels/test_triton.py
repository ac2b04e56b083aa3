"""The Triton kernels without a GPU: run in the interpreter, and compiled for several GPUs."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install 'isokron[triton]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)

import triton
from sass import Machine, machine_code

from isokron.kernels import triton_adamw
from isokron.kernels.triton_symmetric import symmetric_matmul
from isokron.kernels.triton_symmetric_tma import symmetric_matmul_tma

TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def test_every_kernel_is_right_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", Path(__file__).parent / "interpreted.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run benchmarks/gpu.py")
def test_the_gpu_benchmark_says_in_one_line_that_there_is_no_gpu() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "needs an NVIDIA GPU" in done.stderr


@pytest.fixture(scope="module", autouse=True)
def compiled_anew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache, so that the tests inspect freshly compiled code."""
    folder = tmp_path_factory.mktemp("triton")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield folder


@cache
def adamw(
    folder: Path,
    capability: int,
    low: bool = False,
    odd: bool = False,
    **flags: bool,
) -> Machine:
    lists = [[torch.zeros(2000 + odd)[odd:]] for _ in range(5)]
    if low:
        lists[:2] = [[tensor.bfloat16() for tensor in tensors] for tensors in lists[:2]]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8}
    step = partial(triton_adamw.adamw_, *lists, step=3, **numbers, **flags)
    return machine_code(step, capability, folder)


@cache
def product(
    folder: Path,
    capability: int,
    dtype: torch.dtype,
    precision: str = "high",
    matmul: Callable[..., torch.Tensor] = symmetric_matmul,
) -> Machine:
    x, add = torch.zeros(2, 256, 512, dtype=dtype), torch.zeros(2, 256, 256, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return machine_code(partial(matmul, x, add.clone(), 0.5, 2.0, add), capability, folder)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_adamw_loads_16_bytes_at_a_time_and_keeps_to_its_registers(
    compiled_anew: Path, capability: int
) -> None:
    # 1024 elements by 128 threads are 8 each: two loads a tensor of float32, one of bfloat16
    code = adamw(compiled_anew, capability)
    assert (code.count("LDG.E.128"), code.count("STG.E.128")) == (8, 6)
    low = adamw(compiled_anew, capability, low=True)
    assert (low.count("LDG.E.128"), low.count("STG.E.128")) == (6, 5)
    most = adamw(compiled_anew, capability, amsgrad=True, maximize=True)
    assert (most.count("LDG.E.128"), most.count("STG.E.128")) == (10, 8)
    assert code.spills == low.spills == most.spills == 0
    assert max(code.registers, most.registers) <= 64  # 8 blocks, 1024 threads a processor
    assert low.registers <= 80  # 6 blocks: bfloat16 goes through shared memory


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_adamw_loads_single_elements_of_tensors_at_odd_addresses(
    compiled_anew: Path, capability: int
) -> None:
    code = adamw(compiled_anew, capability, odd=True)
    assert not any(code.count(f"LDG.E.{bits}") for bits in (128, 256))
    assert code.spills == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_adamw_rounds_where_the_source_says_and_nowhere_else(
    compiled_anew: Path, capability: int
) -> None:
    code = adamw(compiled_anew, capability)
    elements = 2 * 8  # of a thread, once with and once without a mask
    expected = {"fma": 5, "mul": 2, "add": 1, "div": 2, "sqrt": 1}
    once = {"div": 1, "sqrt": 1}  # the bias corrections
    for operation, count in expected.items():
        assert code.float32(operation) == count * elements + once.get(operation, 0)
    # without .rn the assembler would be free to fuse or to approximate
    for operation in (*expected, "sub"):
        assert code.float32(operation) == code.float32(f"{operation}.rn")
    assert "ftz" not in code.ptx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_products_use_tensor_cores_without_spilling(
    compiled_anew: Path, capability: int, dtype: torch.dtype
) -> None:
    code = product(compiled_anew, capability, dtype)
    assert code.count(TENSOR_CORES[capability]) > 0
    assert code.count("LDGSTS.E.BYPASS.128") > 0  # global to shared memory without registers
    assert code.count("STG.E.128") == code.count("STG")
    assert code.spills == 0
    assert code.shared <= 99 * 1024  # what every GPU since sm_80 has for one block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [90, 100])
def test_products_by_descriptors_leave_all_tiles_to_the_memory_accelerator(
    compiled_anew: Path, capability: int, dtype: torch.dtype
) -> None:
    code = product(compiled_anew, capability, dtype, matmul=symmetric_matmul_tma)
    assert code.count(TENSOR_CORES[capability]) > 0
    assert code.count("UTMALDG.3D") == code.count("UTMALDG") >= 5  # two a stage, and the addend
    assert code.count("UTMASTG.3D") == code.count("UTMASTG") == 2  # a tile and its transpose
    assert code.count("LDG") == 2  # row and column of the tile
    assert code.count("STG") == code.count("LDGSTS") == 0
    assert code.spills == 0
    assert code.shared <= 227 * 1024  # what one block has since sm_90


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_products_of_float32_in_full_use_no_tensor_cores(
    compiled_anew: Path, capability: int
) -> None:
    code = product(compiled_anew, capability, torch.float32, "highest")
    assert not any(code.count(name) for name in TENSOR_CORES.values())
    assert code.count("FFMA") > 0
    assert code.spills == 0
