"""Tensors in fewer bytes: 8-bit codes, and 16-bit codes and bfloat16 by stochastic rounding.

Codes of 8 bits are those of "8-bit Optimizers via Block-wise Quantization" (Dettmers et al.,
2110.02861), except that the signed code is symmetric and the unsigned one has no zero: a second
moment that is rounded to zero would turn a small first moment into a huge step.
"""

from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from isokron.linalg import halved, mirror_, sent, unhalve_

BLOCK = 256  # values that share a scale
SHIFT = 13  # mantissa bits of a float32 that its nearest code is not looked up by; 10 remain
DROPPED = 16  # bits of a float32 that bfloat16 does not have
UNIT = 2**15 - 1  # the code of a correlation of 1


def dynamic_levels(decades: int) -> Tensor:
    """2ⁱ evenly spaced levels in (10^(i−d), 10^(i−d+1)] for i < d decades, in float64. [2ᵈ − 1]"""
    numbers = [
        torch.arange(1, 2**i + 1, dtype=torch.float64, device="cpu") / 2**i for i in range(decades)
    ]
    return torch.cat([10.0 ** (i - decades) * (1 + 9 * x) for i, x in enumerate(numbers)])


@lru_cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Levels by code, nearest codes by the leading bits of a number in [0, 1], the first bits."""
    levels = dynamic_levels(7 if signed else 8)
    if signed:
        levels = torch.cat([levels.new_zeros(1), levels])
    edges = torch.tensor([levels[levels > 0][0] / 4, 1.0], dtype=torch.float32, device="cpu")
    first, last = (edges.view(torch.int32) >> SHIFT).tolist()
    bits = torch.arange(first, last + 1, dtype=torch.int32, device="cpu") << SHIFT
    middle = (bits + (1 << (SHIFT - 1))).view(torch.float32).double()
    nearest = torch.bucketize(middle, (levels[1:] + levels[:-1]) / 2)
    if signed:
        levels = torch.cat([-levels[1:].flip(0), levels])
    codes = nearest.to(torch.int8 if signed else torch.uint8)
    return sent(levels.float(), device), sent(codes, device), first


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of the shape of x, and the scales of their blocks. x: [R, ...] → [R, ...], [R, n]

    A block is up to 256 values of one row. Its scale s is its largest magnitude, and a code stands
    for the level nearest to |x|/s (to within 2⁻¹¹ of it). Unsigned codes are for x ≥ 0.
    """
    _, codes_by_bits, first = _tables(signed, x.device)
    blocks = _blocks(x.float())
    magnitudes = blocks.abs()
    scale = magnitudes.amax(-1)
    unit = magnitudes / scale.clamp_min(torch.finfo(scale.dtype).tiny).unsqueeze(-1)
    # clamped also from above: NaN has large bits, and its scale keeps it NaN
    bits = (unit.view(torch.int32) >> SHIFT).sub_(first).clamp_(0, len(codes_by_bits) - 1)
    codes = codes_by_bits.index_select(0, bits.flatten()).view_as(blocks)
    if signed:
        codes = codes * blocks.sign().to(torch.int8)
    return codes.flatten(1)[:, : prod(x.shape[1:])].contiguous().view(x.shape), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that codes, int8 if signed and uint8 otherwise, stand for. [R, ...]"""
    signed = codes.dtype is torch.int8
    levels, _, _ = _tables(signed, codes.device)
    blocks = _blocks(codes)
    numbers = blocks.flatten().to(torch.int32).add_(len(levels) // 2 if signed else 0)
    values = levels.index_select(0, numbers).view(blocks.shape).to(dtype)
    values = values.mul_(scale.to(dtype).unsqueeze(-1)).flatten(1)
    return values[:, : prod(codes.shape[1:])].contiguous().view(codes.shape)


def _blocks(x: Tensor) -> Tensor:
    """The rows of x in blocks, the last of which is filled with zeros. [R, n, 256 or fewer]"""
    flat = x.reshape(len(x), prod(x.shape[1:]))
    length = max(1, min(BLOCK, flat.size(1)))
    missing = -flat.size(1) % length
    return (pad(flat, (0, missing)) if missing else flat).unflatten(1, (-1, length))


def quantize_symmetric(matrix: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of the triangle of Cᵢⱼ = Aᵢⱼ/(sᵢsⱼ) in 16-bit codes, and s = √diag A. A: [R, n, n]

    For positive semidefinite A, whose |Cᵢⱼ| ≤ 1; only its lower triangle is read. The error of
    every entry is the same share of sᵢsⱼ. bfloat16, of as many bits, has that of the entry itself:
    summed over a mean of many steps it hides the small eigenvalues. seeds: as of
    stochastic_bfloat16; a code's expectation is exact.
    """
    scale = matrix.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().float()
    inverse = torch.where(scale > 0, scale.reciprocal(), 0)
    unit = matrix.float() * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    triangle = halved(unit).mul_(UNIT)
    noise = _random_bits(triangle.size(1), seeds, matrix.device) * 2.0**-DROPPED
    codes = triangle.add_(noise).floor_().clamp_(-UNIT, UNIT).to(torch.int16)
    return codes.view(torch.uint8), scale  # as bytes: gloo sends no int16


def dequantize_symmetric(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices that codes of 16 bits stand for. [R, n, n]"""
    size, scale = scale.size(-1), scale.to(dtype)
    matrices = torch.empty(len(codes), size, size, dtype=dtype, device=codes.device)
    unhalve_(matrices, codes.contiguous().view(torch.int16).to(dtype).div_(UNIT))
    return mirror_(matrices.mul_(scale.unsqueeze(-1)).mul_(scale.unsqueeze(-2)))


def stochastic_bfloat16(x: Tensor, seeds: Tensor) -> Tensor:
    """Round to one of the two neighbours in bfloat16, so that the expectation is x. [R, ...]

    seeds: one a row, [R], such as the number of steps. The random bits are a function of the seed
    and of an element's position in its row, so resumed runs and other ranks draw the same.
    """
    rows = x.float().reshape(len(seeds), x.numel() // max(1, len(seeds))).contiguous()
    bits = rows.view(torch.int32) + _random_bits(rows.size(1), seeds, x.device)
    bits &= -1 << DROPPED
    return bits.view(torch.float32).view(x.shape).to(torch.bfloat16)


def _random_bits(count: int, seeds: Tensor, device: torch.device) -> Tensor:
    """Numbers from 0 to 2¹⁶ − 1, two by every hash of 32 bits. seeds: [R] → [R, count]"""
    index = torch.arange(-(-count // 2), dtype=torch.int32, device=device)
    seeds = sent(seeds.to(torch.int32), device)  # some devices have no float64
    # odd 32-bit constants, as signed numbers; a product keeps the low 32 bits. The two rounds of
    # shift and multiply are those of the lowbias32 hash.
    x = index * -1640531527 + seeds.view(-1, 1) * 668265263
    x = (x ^ ((x >> 16) & 0xFFFF)) * 2146121005
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261
    x = x ^ ((x >> 16) & 0xFFFF)
    return x.view(torch.int16)[:, :count].to(torch.int32) & 0xFFFF
