"""Models whose gradients are what a test says, on every rank, and their averages over ranks."""

from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

HALF = torch.bfloat16
UGLY: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((), torch.float32),
    ((1,), torch.float32),
    ((31,), torch.float32),
    ((0,), torch.float32),
    ((127, 3), torch.float32),
    ((65537,), torch.float32),
    ((2, 65549), torch.float32),
    ((0, 5), torch.float32),
    ((1009,), HALF),
    ((70001,), HALF),
    ((97,), torch.float64),
    ((64, 64), torch.float32),
]
SMALL: list[tuple[tuple[int, ...], torch.dtype]] = [((7,), torch.float32), ((3, 5), torch.float32)]


class Model(nn.Module):
    """Parameters whose gradients are what one says: loss Σ p·g."""

    def __init__(self, kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        for i, (shape, dtype) in enumerate(kinds):
            values = torch.randn(shape, generator=drawn).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(values))

    def all(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def backward(self, grads: list[Tensor | None]) -> None:
        pairs = zip(self.all(), grads, strict=True)
        sum((p * g).sum().double() for p, g in pairs if g is not None).backward()


def gradients(model: Model, rank: int, turn: int, exact: bool = False) -> list[Tensor]:
    """A rank's gradients. `exact`: such whose sums and averages have no rounding."""
    drawn = torch.Generator().manual_seed(1000 * turn + rank)
    if exact:
        every = [torch.randint(-8, 9, p.shape, generator=drawn) / 4 for p in model.parameters()]
    else:
        every = [torch.randn(p.shape, generator=drawn) for p in model.parameters()]
    return [grad.to(p.dtype) for grad, p in zip(every, model.parameters(), strict=True)]


def average(model: Model, ranks: int, turn: int, exact: bool = False) -> list[Tensor]:
    """((g₀ + g₁) + …)/R, in the gradients' dtype."""
    every = [gradients(model, rank, turn, exact) for rank in range(ranks)]
    return [reduce(add, each) / ranks for each in zip(*every, strict=True)]


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of parameters of which a bit differs."""
    others = dict(other.named_parameters())
    return [n for n, p in one.named_parameters() if not torch.equal(p, others[n])]
