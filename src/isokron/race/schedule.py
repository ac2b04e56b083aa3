"""What every run shares: the learning-rate schedule, the evaluation points, the batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

WARMUP = 0.1  # of all steps
EVALUATIONS = 25


def warmup_cosine(step: int, steps: int) -> float:
    """Factor on the learning rate: linear over the first tenth, then half a cosine to 0."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def evaluation_steps(steps: int) -> list[int]:
    """About 25 evenly spread step counts, from 0 (untrained) to `steps`."""
    count = min(steps, EVALUATIONS - 1)
    return sorted({round(i * steps / count) for i in range(count + 1)})


def batch_order(examples: int, batch_size: int, steps: int, seed: int) -> Tensor:
    """Example indices of every step, [steps, batch_size]: epoch after epoch of permutations."""
    generator = torch.Generator().manual_seed(seed)
    per_epoch = examples // batch_size
    epochs = [
        torch.randperm(examples, generator=generator)[: per_epoch * batch_size]
        for _ in range(-(-steps // per_epoch))
    ]
    return torch.cat(epochs).view(-1, batch_size)[:steps]


def digest(tensors: Iterable[Tensor]) -> str:
    """Sixteen hex digits that tell whether two runs had the same tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]
