"""α·XXᵀ + β·C at half the work of a matrix product, by Triton.

Only tiles on and above the diagonal are multiplied; those above it are stored twice, the second
time transposed. The sum is formed in float32 before it is stored, so that bA + cA² of Newton–Schulz
is one launch: A is symmetric, A² = AAᵀ.

Compiled and interpreted, not yet run or timed on a GPU.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# By bytes per element: rows and columns of a tile, and columns of X multiplied at a time. Larger
# float32 tiles do not fit the registers.
TILES = {2: (128, 32), 4: (64, 32)}
OPTIONS = {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True}
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
    out = result_of(x, out, add)
    if out.numel():
        tile, depth = TILES[x.element_size()]
        table = tile_table(x.device, triton.cdiv(x.size(1), tile))
        addend = out if add is None else add
        tensors = (x, x.stride(), out, out.stride(), addend, addend.stride(), table)
        numbers = (len(table), x.size(1), x.size(2), float(alpha), float(beta))
        flags = {"ADD": add is not None, "PRECISION": precision()}
        grid = (len(x) * len(table),)
        _kernel[grid](*tensors, *numbers, **flags, TILE=tile, DEPTH=depth, **OPTIONS)
    return out


def result_of(x: Tensor, out: Tensor | None, add: Tensor | None) -> Tensor:
    """The tensor for α·XXᵀ + β·C; a ValueError for what has no such product."""
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
    return out


def precision() -> str:
    """Of products of float32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


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


@lru_cache(maxsize=64)
def tile_table(device: torch.device, tiles: int) -> Tensor:
    """(row, column) of all tiles with row ≤ column, in squares of GROUP². [pairs, 2]"""
    row, column = torch.triu_indices(tiles, tiles)
    square = (column // GROUP) * tiles + row // GROUP
    order = torch.argsort((square * tiles + column) * tiles + row)
    return torch.stack([row, column], dim=1)[order].to(device, torch.int32)


@triton.jit
def _kernel(
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
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One tile of one matrix of the batch."""
    batch = tl.program_id(0) // pairs
    pair = tl.program_id(0) % pairs
    row, column = tl.load(table + 2 * pair) * TILE, tl.load(table + 2 * pair + 1) * TILE
    upper = row + tl.arange(0, TILE).to(tl.int64)
    lower = column + tl.arange(0, TILE).to(tl.int64)
    total = tl.zeros((TILE, TILE), tl.float32)
    inner = tl.arange(0, DEPTH)
    x += batch.to(tl.int64) * x_strides[0]
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
    inside = (upper < rows)[:, None] & (lower < rows)[None, :]
    total *= alpha
    if ADD:
        add += batch.to(tl.int64) * add_strides[0]
        place = upper[:, None] * add_strides[1] + lower[None, :] * add_strides[2]
        total += beta * tl.load(add + place, inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(
        out + upper[:, None] * out_strides[1] + lower[None, :] * out_strides[2], result, inside
    )
    if row != column:  # the tile across the diagonal is its transpose
        across = out + lower[:, None] * out_strides[1] + upper[None, :] * out_strides[2]
        tl.store(across, result.T, inside.T)
