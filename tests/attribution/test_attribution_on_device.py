"""Attribution on a second device, in half precision and of compiled models.

The second device is in a process of its own, since a backend of torch stays registered.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron import Attributor, losses

SCRIPT = """
import json
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import second_device
import torch
from torch import nn
from isokron import Attributor, losses
from letters import attributor

folder = Path(sys.argv[3])


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
    )


def images(name, device):
    torch.manual_seed(1)
    data = list(zip(torch.randn(12, 1, 6, 6), torch.arange(12) % 4))
    return Attributor(folder / name, network(), data, loss=losses.CrossEntropy(), device=device)


def letters(name, device):
    return attributor(folder / name, device=device)


def language(name, device):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=30, n_positions=16, n_embd=8, n_layer=1, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )
    data = [{"input_ids": torch.randint(30, (7,))} for _ in range(6)]

    def loss(model, batch):
        tokens = batch["input_ids"]
        logits = model(input_ids=tokens).logits[:, :-1]
        terms = nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        return terms

    model = GPT2LMHeadModel(config).to(device)
    model.tie_weights()  # which torch unties on a device without its own kind of tensor
    return Attributor(folder / name, model, data, loss=loss, layers="*,!*.wpe")


def results(make, name, device, method):
    a = make(f"{name}-{device}", device)
    if device != "cpu":
        assert all(p.device.type == device for p in a.subject.model.parameters())
    a.fit(method)
    queries = [a.data.source[n] for n in (0, 3)] if a.task is None else a.task.held_out
    parts = {"self": a.self_influence(store=False)}
    for unit in (False, True):
        scores = a.score(queries, unit=unit, by_layer=True, verify=True, name=f"unit-{unit}")
        parts[f"scores {unit}"] = scores.as_subclass(torch.Tensor)
        parts[f"by layer {unit}"] = scores.by_layer
        parts[f"tokens {unit}"] = torch.tensor(
            [sum(values) for table in scores.tokens for _, values in sorted(table.items())]
        )
    for mode in ("mean", "nearest"):
        parts[mode] = a.score(queries, mode=mode, unit=True, save=False).as_subclass(torch.Tensor)
    # a fold depends on the signs of eigenvectors, which rounding may decide
    a.build(dim=4 if method == "kfac" else 100)
    stored = a.score(queries, by_layer=True, name="stored")
    parts["stored"] = stored.as_subclass(torch.Tensor)
    parts["stored self"] = a.self_influence()
    again = make(f"{name}-{device}", device)
    parts["opened again"] = again.score(queries, save=False).as_subclass(torch.Tensor)
    assert a.report().stat().st_size > 1000
    record = json.loads((a.folder.scores / "unit-False.json").read_text())
    changes = record["answers"][0]["verify"]
    parts["verify"] = torch.tensor([changes["before"], changes["proponents"]])
    return parts


cases = ((images, "kfac"), (letters, "ekfac"), (language, "kfac"), (language, "ekfac"))
for make, method in cases:
    name = f"{make.__name__}-{method}"
    right, there = (results(make, name, device, method) for device in ("cpu", "npu"))
    for key, value in right.items():
        assert there[key].device.type == "cpu", (name, key)
        scale = float(value.abs().max())
        error = float((there[key] - value).abs().max())
        assert error <= 1e-3 * scale, (name, key, error, scale)
"""


@pytest.mark.usefixtures("second_device")
def test_the_pipeline_on_a_second_device_gives_the_scores_of_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, here.parent, here, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


class Words(nn.Module):
    """Tokens [N, S] → logits [N, S, 11]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.norm(self.table(tokens)).cumsum(1)).tanh())


def words(folder: Path, change: Any = lambda model: model) -> Attributor:
    torch.manual_seed(0)
    tokens = torch.randint(11, (12, 6))
    data = [(row[:-1], row[1:]) for row in tokens]
    return Attributor(folder, change(Words()), data, loss=losses.CrossEntropy(), layers="*")


def scored(a: Attributor) -> dict[str, Tensor]:
    """All that a run computes, by name."""
    queries = [a.data.source[number] for number in range(3)]
    exact = a.fit().score(queries, by_layer=True, verify=True)
    unit = a.score(queries, unit=True, save=False)
    a.build(dim=100)
    stored = a.score(queries, store=True)
    assert a.report().exists()
    results = {"exact": exact, "unit": unit, "stored": stored}
    return {name: scores.as_subclass(Tensor) for name, scores in results.items()} | {
        "by layer": exact.by_layer,
        "self": a.self_influence(store=False),
    }


def test_a_model_in_bfloat16_has_scores_near_those_in_float32(tmp_path: Path) -> None:
    right = scored(words(tmp_path / "wide"))
    half = scored(words(tmp_path / "half", lambda model: model.bfloat16()))
    for name, value in right.items():
        assert half[name].dtype is torch.float32, name
        error = (half[name] - value).norm() / value.norm()
        assert error < 0.1, (name, float(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_has_the_scores_of_the_plain_one(tmp_path: Path) -> None:
    right = scored(words(tmp_path / "plain"))
    compiled = words(tmp_path / "compiled", lambda model: torch.compile(model, backend="eager"))
    assert [layer.name for layer in compiled.subject.layers] == ["table", "norm", "mix", "head"]
    for name, value in scored(compiled).items():
        torch.testing.assert_close(value, right[name], rtol=1e-3, atol=1e-5)
