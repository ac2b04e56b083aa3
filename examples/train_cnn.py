"""Train a small residual CNN on handwritten digits with Muon, in a plain PyTorch loop.

    python examples/train_cnn.py [--steps 200] [--optimizer Muon|AdamW|SignDescent]

Nothing is hidden: `isokron.param_groups` decides which parameters are matrices of a layer, one
optimizer steps all of them, one scheduler drives it.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import isokron


class Residual(nn.Module):
    """Two 3×3 convolutions around a skip connection, as in torchvision's BasicBlock."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(h)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--optimizer", default="Muon", choices=["Muon", "AdamW", "SignDescent"])
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    train, test = order[:1500], order[1500:]

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        Residual(32),
        nn.MaxPool2d(2),
        Residual(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    optimizer = getattr(isokron, args.optimizer)(isokron.param_groups(model), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    print(isokron.describe(optimizer))

    for step in range(args.steps):
        batch = train[torch.randint(len(train), (64,))]
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"accuracy on {len(test)} unseen digits: {accuracy:.1%}")


if __name__ == "__main__":
    main()
