"""Plot the health of an optimizer in TensorBoard: run this, then `tensorboard --logdir runs`.

docs/statistics.md says what the numbers mean.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import isokron

STEPS = 60
LOG_EVERY = 10

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16  # [1797, 64]
labels = torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = isokron.SOAP(isokron.param_groups(model), lr=3e-3)
optimizer.statistics()  # from the first call on, steps are recorded

with SummaryWriter("runs/statistics") as writer:
    for step in range(STEPS + 1):
        rows = torch.randint(len(images), (256,))
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY:
            continue
        print(f"step {step:3d}  loss {loss.item():.3f}")
        writer.add_scalar("loss", loss.item(), step)
        for statistics in optimizer.statistics():
            group = statistics.pop("name")
            for key, value in statistics.items():
                if value is not None:  # not known of this optimizer
                    writer.add_scalar(f"optimizer/{group}/{key}", value, step)
