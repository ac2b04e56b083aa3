"""What the naive versions share: loops over dimensions, float64, nothing clever."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import isokron

SHAPES = [(6,), (4, 5), (3, 4, 2), (3, 4, 2, 4)]  # at order None, max_dim 6 not merged or cut


def flat(x: Tensor, i: int) -> Tensor:
    """Dimension i as rows, the others as columns."""
    return x.transpose(0, i).reshape(x.shape[i], -1)


def times(x: Tensor, matrix: Tensor, i: int) -> Tensor:
    return torch.tensordot(matrix, x, dims=([1], [i])).movedim(0, i)


def power(matrix: Tensor, p: float) -> Tensor:
    values, basis = torch.linalg.eigh(matrix)
    return basis @ torch.diag(values**p) @ basis.T


def folded(mean: Tensor, new: Tensor, beta: float) -> Tensor:
    """βM + (1−β)X; M + X at β = 1."""
    return beta * mean + (1 - beta if beta < 1 else 1) * new


def hat(mean: Tensor, beta: float, t: int, correct: bool = True) -> Tensor:
    return mean / (1 - beta**t) if correct and beta < 1 else mean


def blended(
    before: Tensor, g: Tensor, beta: float, beta3: float | None, t: int, correct: bool = True
) -> Tensor:
    """β₃M₋ + (1−β₃)G over 1 − β₃βᵗ⁻¹, M₋ the mean of the gradients before G; β₃ = β by default."""
    beta3 = beta if beta3 is None else beta3
    moment = beta3 * before + (1 - beta3) * g
    return moment / (1 - beta3 * beta ** (t - 1)) if correct else moment


def gradients(shape: tuple[int, ...], steps: int, seed: int = 0) -> Tensor:
    """Gradients with correlated entries of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(steps, *shape, generator=generator, dtype=torch.float64)
    for i, size in enumerate(shape):
        mix = torch.randn(size, size, generator=generator, dtype=torch.float64) + torch.eye(size)
        grads = times(grads, mix, i + 1)
    return grads


def blocks(x: Tensor, max_dim: int) -> Iterator[tuple[slice, ...]]:
    """Where the blocks of a matrix are."""
    for i in range(0, x.shape[0], max_dim):
        for j in range(0, x.shape[1], max_dim):
            yield slice(i, i + max_dim), slice(j, j + max_dim)


def assert_follows(
    optimizer: Callable[..., isokron.Preconditioned],
    naive: Callable[[list[Tensor]], list[Tensor]],
    grads: Tensor,
    **settings: object,
) -> None:
    """The optimizer, stepping two parameters of which one misses gradients, walks the naive path.

    `naive` takes the gradients a parameter has seen and returns the updates, decay and lr aside.
    """
    lr, decay = 0.1, 0.01
    names = ("always", "sometimes")
    starts = [torch.randn(grads.shape[1:], dtype=torch.float64) for _ in names]
    params = [nn.Parameter(start.clone()) for start in starts]
    # the naive version of a parameter knows of no other, with which it could take turns
    form = {"vectors": True, "order": None, "max_dim": 6, "refresh": "together"}
    group = {"params": params, **form, **settings}
    stepping = optimizer([group], lr=lr, weight_decay=decay)
    seen: list[list[Tensor]] = [[], []]
    for t, grad in enumerate(grads):
        params[0].grad, params[1].grad = grad, grad.flip(0) if t % 3 else None
        for some, param in zip(seen, params, strict=True):
            if param.grad is not None:
                some.append(param.grad.clone())
        stepping.step()
    for name, start, some, param in zip(names, starts, seen, params, strict=True):
        expected = start
        for update in naive(some):
            expected = expected - lr * (update + decay * expected)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=1e-6, msg=name)
