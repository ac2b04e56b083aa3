"""α·XXᵀ + β·C as in triton_symmetric, with tiles moved by the tensor memory accelerator (TMA).

GPUs from sm_90 on copy whole tiles between global and shared memory, given a descriptor of the
tensor: no thread computes addresses or masks, and what lies outside is zero. Rows must begin at
multiples of 16 bytes.

Compiled and interpreted, not yet run or timed on a GPU; benchmarks/gpu.py compares it with the
kernel of pointers. Nothing else uses it.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from isokron.kernels.triton_symmetric import precision, result_of, symmetric_matmul, tile_table

# By bytes per element: rows and columns of a tile, and columns of X multiplied at a time, which are
# 128 bytes: the width that shared memory is swizzled by.
TILES = {2: (128, 64), 4: (64, 32)}
OPTIONS = {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True}


def symmetric_matmul_tma(
    x: Tensor,
    out: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    add: Tensor | None = None,
) -> Tensor:
    """α·XXᵀ + β·C; arguments are those of symmetric_matmul. x: [B, m, k] → [B, m, m]"""
    out = result_of(x, out, add)
    if not x.numel():  # which no descriptor can say
        return symmetric_matmul(x, out, alpha, beta, add)
    for name, tensor in (("x", x), ("out", out), ("add", add)):
        if tensor is not None and not is_describable(tensor):
            raise ValueError(
                f"{name} must have contiguous rows that begin at multiples of 16 bytes, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}; use symmetric_matmul"
            )
    tile, depth = TILES[x.element_size()]
    table = tile_table(x.device, triton.cdiv(x.size(1), tile))
    source = _described(x, [1, tile, depth])
    target, addend = (_described(t, [1, tile, tile]) for t in (out, out if add is None else add))
    numbers = (len(table), x.size(2), float(alpha), float(beta))
    flags = {"ADD": add is not None, "PRECISION": precision(), "TILE": tile, "DEPTH": depth}
    _kernel[(len(x) * len(table),)](source, target, addend, table, *numbers, **flags, **OPTIONS)
    return out


def is_describable(tensor: Tensor) -> bool:
    """Whether the accelerator can address a tensor [B, m, k]."""
    *outer, inner = tensor.stride()
    sizes = [stride * tensor.element_size() for stride in outer]
    return inner == 1 and tensor.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in sizes)


def _described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@triton.jit
def _kernel(
    x: tl.tensor_descriptor,
    out: tl.tensor_descriptor,
    add: tl.tensor_descriptor,
    table: tl.tensor,
    pairs: tl.tensor,
    columns: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One tile of one matrix of the batch."""
    batch = tl.program_id(0) // pairs
    pair = tl.program_id(0) % pairs
    row, column = tl.load(table + 2 * pair) * TILE, tl.load(table + 2 * pair + 1) * TILE
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, columns, DEPTH):
        a = x.load([batch, row, start]).reshape(TILE, DEPTH)
        b = x.load([batch, column, start]).reshape(TILE, DEPTH)
        total = tl.dot(a, b.T, total, input_precision=PRECISION)
    total *= alpha
    if ADD:
        total += beta * add.load([batch, row, column]).reshape(TILE, TILE).to(tl.float32)
    result = total.to(out.dtype)
    out.store([batch, row, column], result.reshape(1, TILE, TILE))
    if row != column:  # the tile across the diagonal is its transpose
        out.store([batch, column, row], result.T.reshape(1, TILE, TILE))
