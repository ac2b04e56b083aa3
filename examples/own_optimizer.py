"""Write an optimizer of your own: one method on the engine, and everything else comes with it.

    python examples/own_optimizer.py

NormalizedDescent steps along the moment scaled to unit norm per matrix: steepest descent in the
Frobenius norm, between SGD and Muon. Blocks, momentum, weight decay, AdamW for everything that is
not a matrix, half precision, checks and exact checkpoints are the engine's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import isokron


class NormalizedDescent(isokron.Preconditioned):
    """W ← W − lr(√min(m, n) · M/‖M‖ + λW)."""

    def __init__(self, params: Any, lr: float = 1e-2, *, momentum: float = 0.9) -> None:
        # a unit vector does not depend on the moment's scale
        traits = isokron.Traits(debias=False)
        super().__init__(params, lr, traits, momentum=momentum, weight_decay=0.1)

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        length = torch.linalg.vector_norm(moment, dim=(-2, -1), keepdim=True)  # [B, 1, 1]
        return moment / (length + 1e-12) * min(moment.shape[-2:]) ** 0.5


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    inputs = torch.randn(512, 20)
    targets = inputs[:, :4].prod(1, keepdim=True).tanh()
    optimizer = NormalizedDescent(isokron.param_groups(model))
    for step in range(200):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0 or step == 199:
            print(f"step {step:4}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
