"""X Xᵀ at half the work of a matrix product, by Triton: only tiles on and above the diagonal.

A tile above the diagonal is stored twice, as it is and transposed, and α·XXᵀ + β·C is formed in
float32 on the way, so that bA + cA² of Newton–Schulz is one launch: A is symmetric, A² = AAᵀ.

Two forms of one algorithm. Pointers and masks serve every device, layout and shape. Tensor
descriptors let the hardware of sm_90 and sm_100 fetch tiles by itself (TMA), and warps that only
fetch run ahead of warps that multiply. Compiled and interpreted, not yet run or timed on a GPU.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# By bytes an element: rows and columns of a tile, and columns of X multiplied at a time. Larger
# tiles of float32 do not fit the registers.
POINTER_TILES = {2: (128, 32), 4: (64, 32)}
DESCRIPTOR_TILES = {2: (128, 64), 4: (64, 32)}
POINTER_OPTIONS = {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True}
# Four warps: with eight the compiler does not specialise them, and says nothing.
DESCRIPTOR_OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
# The tensor cores of sm_90 take 64 rows a warp group. Of more, the compiler would split the tile
# itself and fail, because it does not split the descriptor.
HOPPER_ROWS = 64
# From so many rows on the descriptors are taken: tiles for all processors of a large GPU.
DESCRIPTOR_ROWS = 1024
# Tiles are worked on in squares of so many a side, whose rows of X stay in the cache together.
GROUP = 8


def symmetric_matmul(
    x: Tensor,
    out: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    add: Tensor | None = None,
) -> Tensor:
    """α·XXᵀ + β·add with a symmetric `add`, of which only the upper tiles are read. x: [..., m, k]

    At most one leading dimension. `out` may be `add`, but not x. Float32 is multiplied in full or
    as TF32, as torch.set_float32_matmul_precision says.
    """
    out = _checked_out(x, out, add)
    if out.numel() == 0:
        return out
    batch, target = _batched(x), _batched(out)
    addend = None if add is None else _batched(add)
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    if descriptors_fit(batch, capability):
        by_descriptors_(batch, target, alpha, beta, addend, hopper=capability[0] == 9)
    else:
        by_pointers_(batch, target, alpha, beta, addend)
    return out


def newton_schulz_(x: Tensor, triples: Sequence[tuple[float, float, float]]) -> Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, once for every (a, b, c). x: [B, m, n], best m ≤ n

    Nothing is scaled: the singular values of `x` should be at most about one.
    """
    gram = x.new_empty(*x.shape[:-1], x.size(-2))
    polynomial, other = torch.empty_like(gram), torch.empty_like(x)
    now = x
    for a, b, c in triples:
        symmetric_matmul(now, gram)
        symmetric_matmul(gram, polynomial, alpha=c, beta=b, add=gram)
        torch.baddbmm(now, polynomial, now, beta=a, out=other)
        now, other = other, now
    return now if now is x else x.copy_(now)


def descriptors_fit(x: Tensor, capability: tuple[int, int]) -> bool:
    """Whether TMA can address `x` [B, m, k] as one matrix of B·m rows, and is expected to pay.

    sm_120 has TMA too, but neither the memory for such tiles nor the tensor cores they are for.
    """
    batch, rows, columns = x.shape
    starts = (x.data_ptr(), x.stride(1) * x.element_size())
    return (
        capability[0] in (9, 10)
        and rows >= DESCRIPTOR_ROWS
        and columns > 0
        and (x.element_size() == 2 or _precision() == "tf32")
        and x.stride(2) == 1
        and (batch == 1 or x.stride(0) == rows * x.stride(1))
        and all(start % 16 == 0 for start in starts)
    )


def _checked_out(x: Tensor, out: Tensor | None, add: Tensor | None) -> Tensor:
    if x.ndim not in (2, 3):
        raise ValueError(f"symmetric_matmul needs [m, k] or [B, m, k], got shape {tuple(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"symmetric_matmul needs float32, float16 or bfloat16, got {x.dtype}")
    shape = (*x.shape[:-1], x.size(-2))
    if out is None:
        out = x.new_empty(shape)
    for name, tensor in (("out", out), ("add", add)):
        if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (shape, x.dtype):
            raise ValueError(
                f"{name} must be {x.dtype} of shape {shape}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    return out


def _batched(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x.unsqueeze(0)


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@lru_cache(maxsize=64)
def tile_table(device: torch.device, tiles: int) -> Tensor:
    """(row, column) of all tiles with row ≤ column, square after square of GROUP². [pairs, 2]"""
    row, column = torch.triu_indices(tiles, tiles)
    square = (column // GROUP) * tiles + row // GROUP
    order = torch.argsort((square * tiles + column) * tiles + row)
    return torch.stack([row, column], dim=1)[order].to(device, torch.int32)


def by_pointers_(x: Tensor, out: Tensor, alpha: float, beta: float, add: Tensor | None) -> None:
    """α·XXᵀ + β·add into `out`, whatever the strides. x: [B, m, k]"""
    batch, rows, columns = x.shape
    tile, depth = POINTER_TILES[x.element_size()]
    table = tile_table(x.device, triton.cdiv(rows, tile))
    addend = out if add is None else add
    _pointer_kernel[(batch * len(table),)](
        x,
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
        TILE=tile,
        DEPTH=depth,
        PRECISION=_precision(),
        **POINTER_OPTIONS,
    )


def by_descriptors_(
    x: Tensor, out: Tensor, alpha: float, beta: float, add: Tensor | None, hopper: bool
) -> None:
    """α·XXᵀ + β·add into `out`, with x [B, m, k] fetched by TMA, on sm_90 if `hopper`."""
    batch, rows, columns = x.shape
    tile, depth = DESCRIPTOR_TILES[x.element_size()]
    part = HOPPER_ROWS if hopper else tile
    table = tile_table(x.device, triton.cdiv(rows, tile))
    flat = x.view(-1, columns)
    addend = out if add is None else add
    _descriptor_kernel[(batch * len(table),)](
        TensorDescriptor.from_tensor(flat, [part, depth]),
        TensorDescriptor.from_tensor(flat, [tile, depth]),
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
        TILE=tile,
        DEPTH=depth,
        PART=part,
        **DESCRIPTOR_OPTIONS,
    )


@triton.jit
def _pointer_kernel(
    x: tl.tensor,
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
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    batch = (tl.program_id(0) // pairs).to(tl.int64)
    pair = tl.program_id(0) % pairs
    row, column = tl.load(table + 2 * pair) * TILE, tl.load(table + 2 * pair + 1) * TILE
    upper = row + tl.arange(0, TILE).to(tl.int64)
    lower = column + tl.arange(0, TILE).to(tl.int64)
    inner = tl.arange(0, DEPTH)
    x += batch * x_strides[0]
    left = x + upper[:, None] * x_strides[1] + inner[None, :] * x_strides[2]
    right = x + lower[:, None] * x_strides[1] + inner[None, :] * x_strides[2]
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, columns, DEPTH):
        within = inner[None, :] < columns - start
        a = tl.load(left, (upper < rows)[:, None] & within, other=0.0)
        b = tl.load(right, (lower < rows)[:, None] & within, other=0.0)
        total = tl.dot(a, b.T, total, input_precision=PRECISION)
        left += DEPTH * x_strides[2]
        right += DEPTH * x_strides[2]
    out += batch * out_strides[0]
    if ADD:
        add += batch * add_strides[0]
        total = _axpby(total, upper, lower, rows, alpha, beta, add, add_strides)
    else:
        total *= alpha
    _store(total, upper, lower, rows, row != column, out, out_strides)


@triton.jit
def _descriptor_kernel(
    left: tl.tensor_descriptor,
    right: tl.tensor_descriptor,
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
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    batch = tl.program_id(0) // pairs
    pair = tl.program_id(0) % pairs
    row, column = tl.load(table + 2 * pair) * TILE, tl.load(table + 2 * pair + 1) * TILE
    first = batch * rows
    total = tl.zeros((PART, TILE), tl.float32)
    second = tl.zeros((PART, TILE), tl.float32)
    # A tile that hangs over its matrix has rows of the next one, which reach nothing that is kept.
    for start in tl.range(0, columns, DEPTH, warp_specialize=True):
        b = right.load([first + column, start]).T
        total = tl.dot(left.load([first + row, start]), b, total)
        if PART < TILE:
            second = tl.dot(left.load([first + row + PART, start]), b, second)
    out += batch.to(tl.int64) * out_strides[0]
    add += batch.to(tl.int64) * add_strides[0]
    upper = row + tl.arange(0, PART).to(tl.int64)
    lower = column + tl.arange(0, TILE).to(tl.int64)
    for half in tl.static_range(TILE // PART):
        if half == 1:
            total = second
            upper += PART
        if ADD:
            total = _axpby(total, upper, lower, rows, alpha, beta, add, add_strides)
        else:
            total *= alpha
        _store(total, upper, lower, rows, row != column, out, out_strides)


@triton.jit
def _axpby(
    total: tl.tensor,
    upper: tl.tensor,
    lower: tl.tensor,
    rows: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    add: tl.tensor,
    strides: tl.tuple,
) -> tl.tensor:
    """α·total + β·add, at rows `upper` and columns `lower` of `add`."""
    inside = (upper < rows)[:, None] & (lower < rows)[None, :]
    place = upper[:, None] * strides[1] + lower[None, :] * strides[2]
    return alpha * total + beta * tl.load(add + place, inside, other=0.0).to(tl.float32)


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
    """`total` to rows `upper` and columns `lower` of `out`, and transposed if to `mirror`."""
    result = total.to(out.dtype.element_ty)
    inside = (upper < rows)[:, None] & (lower < rows)[None, :]
    tl.store(out + upper[:, None] * strides[1] + lower[None, :] * strides[2], result, inside)
    if mirror:
        across = out + lower[:, None] * strides[1] + upper[None, :] * strides[2]
        tl.store(across, result.T, inside.T)
