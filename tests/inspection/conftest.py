"""Small tasks to inspect: a regression without logits, and a classification with them."""

import pytest
import torch
from torch import nn

from isokron.inspect import Setup, measure
from isokron.tasks import Examples, Task


@pytest.fixture
def inspected():
    """A short inspection: task, options of `Setup` → result and curvature."""
    return lambda task, **options: measure(Setup(task, **{"steps": 3, "examples": 20, **options}))


@pytest.fixture
def regression() -> Task:
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(7))
    examples = Examples((inputs, inputs[:, :2].clone()))
    return Task(
        name="regression",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)),
        train=examples,
        evaluation=examples,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().sum(1),
        batch_size=10,
    )


class Reader(nn.Module):
    """Tokens [n, 5] → scores [n, 5, 4]; all examples share the embedding of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, 6)
        self.places = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens):
        return self.head(self.norm(self.tokens(tokens) + self.places(torch.arange(5))))


def scores(model, batch):
    (tokens,) = batch
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    return model(tokens), targets


def mean_loss(model, batch):
    outputs, targets = scores(model, batch)
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).sum(1) / 4


@pytest.fixture
def reading() -> Task:
    tokens = torch.randint(0, 4, (30, 5), generator=torch.Generator().manual_seed(7))
    examples = Examples((tokens,))
    return Task("reading", lambda: Reader(), examples, examples, mean_loss, 8, logits=scores)
