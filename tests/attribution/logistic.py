"""Multinomial logistic regression on small digits, trained until nothing changes any more."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from isokron import tasks
from isokron.tasks import Examples, Task

DECAY = 0.03  # λ of the loss + λ/2·‖θ‖², bias included


def digits(examples: int) -> Task:
    """8×8 digits and a linear model, the first of the training examples only."""
    task = tasks.load("digits")
    train = Examples(tuple(tensor[:examples] for tensor in task.train.tensors))
    linear = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
    return replace(task, name="digits-linear", train=train, model=linear)


def fit(task: Task, indices: Tensor, seed: int) -> nn.Module:
    """The minimum, which no seed changes."""
    model = task.model()
    batch = task.train.batch(indices)
    for param in model.parameters():
        nn.init.zeros_(param)
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=200,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        norm = sum(param.square().sum() for param in model.parameters())
        loss = task.losses(model, batch).mean() + DECAY / 2 * norm
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def influence(task: Task, model: nn.Module, queries: Examples) -> Tensor:
    """⟨∇_q, (H + λI)⁻¹ ∇_t⟩ with the whole Hessian, in float64: [Q, N]."""
    linear = model[1]
    weights = torch.cat([linear.weight, linear.bias[:, None]], 1).detach().double()

    def seen(examples: Examples) -> tuple[Tensor, Tensor, Tensor]:
        x = examples.tensors[0].flatten(1).double()
        x = torch.cat([x, torch.ones(len(x), 1)], 1)
        p = (x @ weights.mT).softmax(1)
        residual = p - nn.functional.one_hot(examples.tensors[1], 10)
        return x, p, (residual[:, :, None] * x[:, None]).flatten(1)

    x, p, rows = seen(task.train)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]  # [N, 10, 10]
    hessian = torch.einsum("nab,ni,nj->aibj", inner, x, x).reshape(650, 650) / len(x)
    damped = hessian + DECAY * torch.eye(650, dtype=torch.float64)
    return seen(queries)[2] @ torch.linalg.solve(damped, rows.mT)
