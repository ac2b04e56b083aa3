"""α·XXᵀ + β·C at half the work of a matrix product, by Triton.

Only tiles on and above the diagonal are multiplied; those above it are stored twice, the second
time transposed. The sum is formed in float32 before it is stored, so that bA + cA² of Newton–Schulz
is one launch: A is symmetric, A² = AAᵀ.

X is read through pointers and masks on any device and layout. On sm_90 and sm_100 it can be read
through tensor descriptors (TMA), with producer warps that run ahead of the warps that multiply.
Compiled and interpreted, not yet run or timed on a GPU.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# By form and bytes per element: rows and columns of a tile, columns of X multiplied at a time, and
# rows of X per tensor-core product. Larger float32 tiles do not fit the registers. sm_90 multiplies
# 64 rows per warp group; the compiler fails on more, because it splits the tile but not the
# descriptor.
TILES = {
    "pointers": {2: (128, 32, 128), 4: (64, 32, 64)},
    "descriptors, sm_90": {2: (128, 64, 64), 4: (64, 32, 64)},
    "descriptors, sm_100": {2: (128, 64, 128), 4: (64, 32, 64)},
}
POINTER_OPTIONS = {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True}
# With eight warps the compiler silently does not specialize them.
DESCRIPTOR_OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
# Descriptors are used from this many rows on: enough tiles for all processors of a large GPU.
DESCRIPTOR_ROWS = 1024
# Tiles are visited in squares of this many per side, whose rows of X fit the cache together.
GROUP = 8


def symmetric_matmul(
    x: Tensor,
    out: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    add: Tensor | None = None,
) -> Tensor:
    """α·XXᵀ + β·C. x: [B, m, k] → [B, m, m]

    float32 is multiplied as float32 or TF32, according to torch.set_float32_matmul_precision.

    Args:
        x: X, in float32, float16 or bfloat16.
        out: the result; may be `add` but not `x`.
        alpha: α.
        beta: β.
        add: C, symmetric; only its upper tiles are read.
    """
    if x.ndim != 3:
        raise ValueError(f"symmetric_matmul needs [B, m, k], got shape {tuple(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"symmetric_matmul needs float32, float16 or bfloat16, got {x.dtype}")
    shape = (len(x), x.size(1), x.size(1))
    out = x.new_empty(shape) if out is None else out
    for name, tensor in (("out", out), ("add", add)):
        if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (shape, x.dtype):
            raise ValueError(
                f"{name} must be {x.dtype} of shape {shape}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if out.numel():
        capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
        multiply_(x, out, alpha, beta, add, fastest_form(x, capability))
    return out


def newton_schulz_(x: Tensor, triples: Sequence[tuple[float, float, float]]) -> Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, once per (a, b, c). x: [B, m, n], fastest if m ≤ n

    The caller scales `x` so that its singular values are at most about one.
    """
    gram = x.new_empty(*x.shape[:-1], x.size(-2))
    polynomial, target = torch.empty_like(gram), torch.empty_like(x)
    current = x
    for a, b, c in triples:
        symmetric_matmul(current, gram)
        symmetric_matmul(gram, polynomial, alpha=c, beta=b, add=gram)
        torch.baddbmm(current, polynomial, current, beta=a, out=target)
        current, target = target, current
    return current if current is x else x.copy_(current)


def fastest_form(x: Tensor, capability: tuple[int, int]) -> str:
    """Descriptors if TMA can address `x` [B, m, k] as one matrix of B·m rows and should pay."""
    batch, rows, columns = x.shape
    # sm_120 has TMA, but neither the shared memory nor the tensor cores for these tiles
    fits = (
        capability[0] in (9, 10)
        and rows >= DESCRIPTOR_ROWS
        and columns > 0
        and (x.element_size() == 2 or _precision() == "tf32")
        and x.stride(2) == 1
        and (batch == 1 or x.stride(0) == rows * x.stride(1))
        and x.data_ptr() % 16 == x.stride(1) * x.element_size() % 16 == 0
    )
    return f"descriptors, sm_{capability[0]}0" if fits else "pointers"


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@lru_cache(maxsize=64)
def tile_table(device: torch.device, tiles: int) -> Tensor:
    """(row, column) of all tiles with row ≤ column, in squares of GROUP². [pairs, 2]"""
    row, column = torch.triu_indices(tiles, tiles)
    square = (column // GROUP) * tiles + row // GROUP
    order = torch.argsort((square * tiles + column) * tiles + row)
    return torch.stack([row, column], dim=1)[order].to(device, torch.int32)


def multiply_(
    x: Tensor, out: Tensor, alpha: float, beta: float, add: Tensor | None, form: str
) -> None:
    """α·XXᵀ + β·add into `out`. x: [B, m, k]; form: a key of TILES"""
    tile, depth, part = TILES[form][x.element_size()]
    batch, rows, columns = x.shape
    left = right = x
    options = POINTER_OPTIONS
    if form != "pointers":
        flat = x.view(-1, columns)
        left, right = (TensorDescriptor.from_tensor(flat, [n, depth]) for n in (part, tile))
        options = DESCRIPTOR_OPTIONS
    table = tile_table(x.device, triton.cdiv(rows, tile))
    addend = out if add is None else add
    _kernel[(batch * len(table),)](
        left,
        right,
        x.stride(),
        out,
        out.stride(),
        addend,
        addend.stride(),
        table,
        len(table),
        rows,
        columns,
        float(alpha),
        float(beta),
        ADD=add is not None,
        TMA=form != "pointers",
        PRECISION=_precision(),
        TILE=tile,
        DEPTH=depth,
        PART=part,
        **options,
    )


@triton.jit
def _kernel(
    x_left: tl.tensor,
    x_right: tl.tensor,
    x_strides: tl.tuple,
    out: tl.tensor,
    out_strides: tl.tuple,
    add: tl.tensor,
    add_strides: tl.tuple,
    table: tl.tensor,
    pairs: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """One tile. PART: rows of X per tensor-core product, TILE or half of it (only with TMA)."""
    batch = tl.program_id(0) // pairs
    pair = tl.program_id(0) % pairs
    row, column = tl.load(table + 2 * pair) * TILE, tl.load(table + 2 * pair + 1) * TILE
    upper = row + tl.arange(0, PART).to(tl.int64)
    lower = column + tl.arange(0, TILE).to(tl.int64)
    total = tl.zeros((PART, TILE), tl.float32)
    second = tl.zeros((PART, TILE), tl.float32)
    if TMA:
        first = batch * rows
        # a tile that exceeds its matrix reads rows of the next one; their products are not stored
        for start in tl.range(0, columns, DEPTH, warp_specialize=True):
            b = x_right.load([first + column, start]).T
            total = tl.dot(x_left.load([first + row, start]), b, total)
            if PART < TILE:
                second = tl.dot(x_left.load([first + row + PART, start]), b, second)
    else:
        inner = tl.arange(0, DEPTH)
        x = x_left + batch.to(tl.int64) * x_strides[0]
        left = x + upper[:, None] * x_strides[1] + inner[None, :] * x_strides[2]
        right = x + lower[:, None] * x_strides[1] + inner[None, :] * x_strides[2]
        for start in range(0, columns, DEPTH):
            within = inner[None, :] < columns - start
            a = tl.load(left, (upper < rows)[:, None] & within, other=0.0)
            b = tl.load(right, (lower < rows)[:, None] & within, other=0.0)
            total = tl.dot(a, b.T, total, input_precision=PRECISION)
            left += DEPTH * x_strides[2]
            right += DEPTH * x_strides[2]
    out += batch.to(tl.int64) * out_strides[0]
    add += batch.to(tl.int64) * add_strides[0]
    for half in tl.static_range(TILE // PART):
        if half == 1:
            total = second
            upper += PART
        if ADD:
            inside = (upper < rows)[:, None] & (lower < rows)[None, :]
            place = upper[:, None] * add_strides[1] + lower[None, :] * add_strides[2]
            total = alpha * total + beta * tl.load(add + place, inside, other=0.0).to(tl.float32)
        else:
            total *= alpha
        _store(total, upper, lower, rows, row != column, out, out_strides)


# a function of its own, because written into _kernel it makes sm_100 spill registers
@triton.jit
def _store(
    total: tl.tensor,
    upper: tl.tensor,
    lower: tl.tensor,
    rows: tl.tensor,
    mirror: tl.tensor,
    out: tl.tensor,
    strides: tl.tuple,
) -> None:
    """Store `total` at rows `upper` and columns `lower` of `out`, and transposed if `mirror`."""
    result = total.to(out.dtype.element_ty)
    inside = (upper < rows)[:, None] & (lower < rows)[None, :]
    tl.store(out + upper[:, None] * strides[1] + lower[None, :] * strides[2], result, inside)
    if mirror:
        across = out + lower[:, None] * strides[1] + upper[None, :] * strides[2]
        tl.store(across, result.T, inside.T)
