"""Curvature on a second device has the numbers of the CPU, and mixes tensors of no two devices.

In a process of its own, since a backend of torch stays registered.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import itertools
import sys
sys.path.insert(0, sys.argv[1])
import second_device
import torch
from torch import nn
from isokron.curvature import CrossEntropy, Curvature, fit

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))

torch.manual_seed(0)
model = Tokens()
x, y = torch.randint(6, (6, 3)), torch.randint(5, (6, 3))
y[1, 2] = -100


def fitted(device, method, fisher, policy):
    data = [(x[:4].to(device), y[:4].to(device)), (x[4:].to(device), y[4:].to(device))]
    options = {"fisher": fisher, "policy": policy, "layers": ["embed", "norm", "head"]}
    return fit(model.to(device), data, CrossEntropy(), method, **options)


fishers, policies = ("empirical", "sampled", "exact"), ("dense", {"head": "all"})
for how in itertools.product(("kfac", "ekfac", "shampoo"), fishers, policies):
    right, found = fitted("cpu", *how).damped_inverse(), fitted("npu", *how)
    found.save(sys.argv[2])
    found = found.damped_inverse()
    tangent = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    want = right.matvec(tangent)
    moved = found.matvec({name: value.to("npu") for name, value in tangent.items()})
    for name, value in moved.items():
        assert value.device.type == "npu", (how, name)
        torch.testing.assert_close(value.cpu(), want[name], rtol=1e-4, atol=1e-5)
    assert len(found.report()) == 3
    Curvature.load(sys.argv[2], model)
"""


@pytest.mark.usefixtures("second_device")
def test_curvature_is_that_of_the_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, Path(__file__).parents[1], tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
