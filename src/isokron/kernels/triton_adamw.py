"""AdamW on lists of CUDA tensors in one launch, by Triton.

m ← β₁m + (g − β₁g), v ← β₂v + (g² − β₂g²)
p ← p − (lr·λ)p − (lr/(1−β₁ᵗ) · m) / (√v/√(1−β₂ᵗ) + ε)      (Loshchilov and Hutter, 1711.05101)

Designed to be bit-exact with torch.optim.AdamW(fused=True) for float32 tensors: the order of
operations is that of fused_adam_utils.cuh in torch 2.13, the fused multiply-adds (`tl.fma` below,
and nowhere else) are those in the machine code of its CUDA 13.0 build, and βᵗ is computed by torch.
Compiled and interpreted, not yet run on a GPU; benchmarks/gpu.py compares the bits there.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements per program: with 128 threads, two 16-byte loads per thread and float32 tensor.
BLOCK = 1024
# The compiler must not fuse more operations than torch's kernel does.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] = (),
    *,
    step: float,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
) -> None:
    """One AdamW step in place, in one launch, or two if some tensors are not 16-byte aligned.

    Args:
        params: float32 or bfloat16, one dtype per list, contiguous.
        grads: likewise, possibly of the other dtype.
        exp_avgs: float32, contiguous.
        exp_avg_sqs: float32, contiguous.
        max_exp_avg_sqs: float32, contiguous; only with amsgrad.
        step: number of this step, from 1.
    """
    lists = [params, grads, exp_avgs, exp_avg_sqs] + [max_exp_avg_sqs] * amsgrad
    if reason := rejection(lists):
        raise ValueError(f"adamw_: {reason}")
    sizes = tuple(map(Tensor.numel, params))
    if not sum(sizes):
        return
    device = params[0].device
    addresses = tuple(tuple(map(Tensor.data_ptr, tensors)) for tensors in lists)
    rate, decay = np.float32(lr), np.float32(weight_decay)
    numbers = (float(lr), float(rate * decay), float(beta1), float(beta2), float(eps))
    flags = {"DECAY": bool(decay), "AMSGRAD": amsgrad, "MAXIMIZE": maximize}
    flags |= {"PARAM_BFLOAT16": params[0].dtype is torch.bfloat16}
    flags |= {"GRAD_BFLOAT16": grads[0].dtype is torch.bfloat16}
    with torch.cuda.device_of(params[0]):
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        table, groups = _address_table(device, stream, addresses)
        for aligned, rows in groups:
            chunks = _chunk_table(device, sizes, rows)
            if not chunks.size(1):
                continue
            tables = (table, table.size(1), chunks, chunks.size(1))
            powers, grid = _powers(device, stream, beta1, beta2, step), (chunks.size(1),)
            _adamw_kernel[grid](*tables, powers, *numbers, BLOCK, aligned, **flags, **OPTIONS)


def rejection(lists: Sequence[Sequence[Tensor]]) -> str | None:
    """Why the kernel cannot update these lists, or None if it can."""
    sizes = list(map(Tensor.numel, lists[0]))
    devices = {tensor.device for tensors in lists for tensor in tensors}
    if len(devices) > 1:
        return f"all tensors must be on one device, got {sorted(map(str, devices))}"
    for name, tensors in zip(NAMES, lists, strict=False):
        if list(map(Tensor.numel, tensors)) != sizes:
            return f"{name} must have the sizes of the {len(sizes)} params"
        dtypes = {tensor.dtype for tensor in tensors}
        allowed = [torch.float32, torch.bfloat16][: 2 if name in NAMES[:2] else 1]
        if len(dtypes) > 1 or not dtypes <= set(allowed):
            rule = " or ".join(map(str, allowed))
            return f"{name} must all be {rule}, got {sorted(map(str, dtypes))}"
        if not all(map(Tensor.is_contiguous, tensors)):
            return f"{name} must be contiguous; call .contiguous() on them"
    return None


@lru_cache(maxsize=8)
def _powers(device: torch.device, stream: int, beta1: float, beta2: float, step: float) -> Tensor:
    """β₁ᵗ and β₂ᵗ in float32, by the powf that torch's kernel calls."""
    # powf is sometimes off by an ulp, so Triton's own version could give other bits; and with a
    # plain number as exponent torch may multiply instead
    betas = _betas(device, beta1, beta2)
    return torch.pow(betas, torch.full_like(betas, step))


@lru_cache(maxsize=8)
def _betas(device: torch.device, beta1: float, beta2: float) -> Tensor:
    return torch.tensor([beta1, beta2], dtype=torch.float32, device=device)


@lru_cache(maxsize=32)
def _address_table(
    device: torch.device, stream: int, addresses: tuple[tuple[int, ...], ...]
) -> tuple[Tensor, list[tuple[bool, tuple[int, ...]]]]:
    """Addresses [list, tensor], and the tensors grouped by 16-byte alignment in every list."""
    # the copy is ordered only on its stream, which is therefore part of the cache key; waiting for
    # it would mean waiting for the backward pass
    host = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    aligned = (host % 16 == 0).all(dim=0)
    groups = [(flag, (aligned == flag).nonzero().flatten().tolist()) for flag in (True, False)]
    if device.type == "cuda":
        host = host.pin_memory()
    table = host.to(device, non_blocking=True)
    return table, [(flag, tuple(rows)) for flag, rows in groups if rows]


@lru_cache(maxsize=32)
def _chunk_table(device: torch.device, sizes: tuple[int, ...], rows: tuple[int, ...]) -> Tensor:
    """Work of each program: tensor, first element, remaining elements. [3, chunks]"""
    size = torch.tensor(sizes, device="cpu")
    chunks = (size + BLOCK - 1) // BLOCK
    tensor = torch.arange(len(sizes), device="cpu").repeat_interleave(chunks)
    offset = (torch.arange(len(tensor), device="cpu") - (chunks.cumsum(0) - chunks)[tensor]) * BLOCK
    work = torch.stack([tensor, offset, size[tensor] - offset])
    return work[:, torch.isin(tensor, torch.tensor(rows, device="cpu"))].contiguous().to(device)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def _adamw_kernel(
    table: tl.tensor,
    tensors: tl.tensor,
    work: tl.tensor,
    chunks: tl.tensor,
    powers: tl.tensor,
    lr: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    DECAY: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PARAM_BFLOAT16: tl.constexpr,
    GRAD_BFLOAT16: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    tensor = tl.load(work + chunk)
    offset = tl.load(work + chunks + chunk)
    left = tl.load(work + 2 * chunks + chunk)
    lane = tl.arange(0, BLOCK)
    param = _start(table, tensor, offset, PARAM_BFLOAT16, ALIGNED) + lane
    grad = _start(table + tensors, tensor, offset, GRAD_BFLOAT16, ALIGNED) + lane
    exp_avg = _start(table + 2 * tensors, tensor, offset, False, ALIGNED) + lane
    exp_avg_sq = _start(table + 3 * tensors, tensor, offset, False, ALIGNED) + lane
    max_exp_avg_sq = exp_avg_sq
    if AMSGRAD:
        max_exp_avg_sq = _start(table + 4 * tensors, tensor, offset, False, ALIGNED) + lane
    scale = tl.div_rn(lr, 1.0 - tl.load(powers))
    root = tl.sqrt_rn(1.0 - tl.load(powers + 1))
    # Each program runs one of two copies of the code: the mask that the end of a tensor needs would
    # split the loads of full chunks into single elements too.
    for MASKED in tl.static_range(2):
        if (left < BLOCK) == (MASKED == 1):
            mask = lane < left if MASKED else None
            p = _to_float32(tl.load(param, mask), PARAM_BFLOAT16)
            g = _to_float32(tl.load(grad, mask), GRAD_BFLOAT16)
            m = tl.load(exp_avg, mask)
            v = tl.load(exp_avg_sq, mask)
            if MAXIMIZE:
                g = -g
            if DECAY:
                p = tl.fma(p, -decay, p)
            m = tl.fma(m, beta1, tl.fma(g, -beta1, g))
            square = g * g
            v = tl.fma(v, beta2, tl.fma(square, -beta2, square))
            tl.store(exp_avg, m, mask)
            tl.store(exp_avg_sq, v, mask)
            if AMSGRAD:
                largest = tl.load(max_exp_avg_sq, mask)
                v = tl.where(largest < v, v, largest)  # keeps the old maximum if v is NaN
                tl.store(max_exp_avg_sq, v, mask)
            p = p - tl.div_rn(m * scale, tl.div_rn(tl.sqrt_rn(v), root) + eps)
            if PARAM_BFLOAT16:
                p = _to_bfloat16(p)
            tl.store(param, p, mask)


@triton.jit
def _start(
    addresses: tl.tensor,
    tensor: tl.tensor,
    offset: tl.tensor,
    BFLOAT16: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Pointer to the elements of a tensor from `offset` on; to the bits for bfloat16."""
    element: tl.constexpr = tl.uint16 if BFLOAT16 else tl.float32
    start = tl.load(addresses + tensor).to(tl.pointer_type(element)) + offset
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def _to_float32(x: tl.tensor, BFLOAT16: tl.constexpr) -> tl.tensor:
    if BFLOAT16:
        x = (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _to_bfloat16(x: tl.tensor) -> tl.tensor:
    """The bfloat16 bits of float32 `x`, rounded to nearest even."""
    # by integers, because the interpreter's conversion to bfloat16 rounds incorrectly
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0).to(tl.uint16)
