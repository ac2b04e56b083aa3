"""Where tall matrices are kept, and how they are read: piece by piece, in the dtype computed in."""

from collections.abc import Iterator

import torch
from torch import Tensor

STORAGES = ("auto", "device", "host")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The most bytes of one matrix that "auto" keeps on an accelerator.
LIMIT = 500_000_000
# Bytes of a piece: large enough to compute at full speed, small beside the matrix.
PIECE = 64_000_000
# The most of its norm a matrix may lose to rounding: bfloat16 takes 0.2 %, so more is underflow.
LOSS = 0.01


def storage_device(
    nbytes: int, device: torch.device | str, storage: str = "auto", limit: int = LIMIT
) -> torch.device:
    """The device itself or the host's memory; "auto": the device up to `limit` bytes."""
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {STORAGES}, got {storage!r}")
    if storage == "host" or (storage == "auto" and nbytes > limit):
        return torch.device("cpu")
    return torch.device(device)


def store(
    matrix: Tensor, dtype: torch.dtype | None = None, storage: str = "auto", limit: int = LIMIT
) -> Tensor:
    """The matrix in `dtype`, where `storage_device` says; pinned where it has left a CUDA device.

    What is not finite, or does not fit the range of `dtype`, is an error.
    """
    dtype = matrix.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"store_dtype must be one of {DTYPES}, got {dtype}")
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    if not norm.isfinite():
        raise ValueError(f"columns must be finite, their norm is {norm.item()}")
    kept = matrix.to(dtype)
    if dtype is not matrix.dtype:
        lost = torch.linalg.vector_norm(kept.to(matrix.dtype) - matrix, dtype=torch.float64)
        if not lost <= LOSS * norm:
            raise ValueError(
                f"store_dtype {dtype} has not the range of columns with largest entry "
                f"{matrix.abs().max().item():.3g}; use bfloat16 or float32"
            )
    device = storage_device(kept.nbytes, kept.device, storage, limit)
    if device == kept.device:
        return kept
    host = torch.empty(kept.shape, dtype=dtype, device=device, pin_memory=kept.is_cuda)
    return host.copy_(kept)


def pieces(
    matrix: Tensor, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """First row and rows of each piece, there and so. [..., n, T] → [..., ≤ n, T]

    A matrix that is already there and so is one piece, and nothing is copied.
    """
    n = matrix.size(-2)
    rows = n
    if matrix.device != device or matrix.dtype != dtype:
        rows = PIECE * n // max(1, matrix.numel() * dtype.itemsize)
    rows = max(1, rows)
    pinned = matrix.is_pinned()  # from other memory, and to it, a copy must have ended
    for start in range(0, n, rows):
        part = matrix[..., start : start + rows, :]
        yield start, part.to(device=device, dtype=dtype, non_blocking=pinned)


def gram(columns: Tensor, device: torch.device, weights: Tensor | None = None) -> Tensor:
    """UᵀU, or Uᵀ diag(weights) U, in float64. U: [..., n, T], weights: [..., n, 1]"""
    shape = (*columns.shape[:-2], columns.size(-1), columns.size(-1))
    total = torch.zeros(shape, dtype=torch.float64, device=device)
    for start, part in pieces(columns, device, torch.float64):
        rows = slice(start, start + part.size(-2))
        total += part.mT @ (part if weights is None else part * weights[..., rows, :])
    if not total.isfinite().all():
        raise ValueError("columns must be finite, UᵀU is not; look for overflow in the gradients")
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: at least float32."""
    return torch.promote_types(dtype, torch.float32)
