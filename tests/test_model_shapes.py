"""Models by name: published sizes, functions, folders; no weights in memory."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from isokron.model_shapes import FAMILIES, make_model

# as published with the weights
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "mistral-7b": 7_241_732_096,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


def count(model: nn.Module) -> int:
    assert all(param.is_meta for param in model.parameters())
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_their_published_number_of_parameters(name: str) -> None:
    assert count(make_model(name)) == COUNTS[name]


def test_a_model_has_the_dtype_asked_for() -> None:
    model = make_model("gpt2", torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_a_task_gives_its_model() -> None:
    pytest.importorskip("sklearn")
    assert count(make_model("digits")) == 38_378


def test_a_function_gives_a_model_whether_or_not_it_asks_for_a_device(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def model():\n    return nn.Linear(30, 40)\n"
        "def here():\n    return nn.Linear(30, 40, device='cpu')\n"
        "def frozen():\n    return nn.Linear(3, 4).requires_grad_(False)\n"
    )
    for name in ("model", "here"):
        assert count(make_model(f"{tmp_path}/mine.py:{name}")) == 30 * 40 + 40
    with pytest.raises(ValueError, match="with trainable parameters"):
        make_model(f"{tmp_path}/mine.py:frozen")


def test_a_folder_with_a_config_gives_the_model_it_names(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 99}
    config |= {"n_positions": 16, "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    blocks = 2 * (12 * 32**2 + 13 * 32)
    assert count(make_model(str(tmp_path))) == (99 + 16) * 32 + blocks + 2 * 32


@pytest.mark.parametrize("wrong", ["lama-7b", "nowhere/at/all", "os:getcwd", ""])
def test_other_names_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="model"):
        make_model(wrong)
