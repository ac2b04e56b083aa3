"""A task small enough that a whole race takes a second, and optimizers that misbehave."""

import torch
from torch import nn

from isokron.tasks import Examples, Task


def task() -> Task:
    """Fit a noisy linear map, 6 → 3."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(96, 6, generator=generator)
    targets = inputs @ torch.randn(6, 3, generator=generator)
    targets += 0.1 * torch.randn(96, 3, generator=generator)
    return Task(
        name="toy",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        train=Examples((inputs[:64], targets[:64])),
        evaluation=Examples((inputs[64:], targets[64:])),
        loss=squared_error,
        batch_size=16,
        unit="squared error",
        sample=lambda model: "<b>fits & smiles</b>",
    )


def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


class Raises(torch.optim.SGD):
    """Works for two steps."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        if self.count > 2:
            raise RuntimeError("no <more> steps")
        return super().step(closure)


class Overflows(torch.optim.SGD):
    def step(self, closure=None):
        raise FloatingPointError("gradient of 0.weight is not finite")


def whole_model(model, lr, momentum=0.0):
    """A factory that wants the model itself."""
    assert isinstance(model, nn.Module)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
