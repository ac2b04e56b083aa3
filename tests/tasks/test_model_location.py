"""Folders of models and of adapters, and names that are no folders."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DOCUMENTS, make, save

from isokron import Attributor
from isokron.tasks.huggingface import classifier, language_model
from isokron.tasks.model_location import locate

peft = pytest.importorskip("peft")

TARGETS = {"gpt2": ["c_attn", "c_proj"], "bert": ["query", "value"]}


def adapted(kind: str, folder: Path, base: Path, tokenizer: bool = False) -> tuple[Path, Any]:
    """A saved adapter with random weights on a saved base, and the model."""
    model = make(kind)[0].from_pretrained(base, dtype=torch.float32)
    task_type = "CAUSAL_LM" if kind == "gpt2" else "SEQ_CLS"
    config = peft.LoraConfig(
        r=2,
        target_modules=TARGETS[kind],
        init_lora_weights=False,
        task_type=task_type,
        fan_in_fan_out=kind == "gpt2",
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(model, config).eval()
    model.save_pretrained(folder)
    if tokenizer:
        make(kind)[1].save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize(("kind", "load"), [("gpt2", language_model), ("bert", classifier)])
@pytest.mark.parametrize("tokenizer", [False, True])
def test_an_adapter_is_loaded_with_its_base_and_alone_is_attributed(
    kind: str, load: Any, tokenizer: bool, tmp_path: Path
) -> None:
    base = save(kind, tmp_path / "base")
    folder, model = adapted(kind, tmp_path / "lora", base, tokenizer)
    if kind == "bert":  # the head is with the adapter
        make("bert")[0].from_pretrained(base).bert.save_pretrained(base)
    task = load(folder, DOCUMENTS, evaluation=0)
    loaded = task.model()
    batch = task.train.batch(torch.arange(len(task.train)))
    torch.testing.assert_close(task.losses(loaded, batch), task.losses(model, batch))
    assert not [name for name in dict(loaded.named_modules()) if name.startswith("base_model.")]
    trained = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert trained
    assert {name for name in trained if "lora_" not in name and "classifier" not in name} == set()
    a = Attributor(tmp_path / "run", loaded, task=task).fit(None)
    covered = {name for layer in a.selection.layers for name in layer.layout.params.values()}
    assert covered == trained
    scores = a.score(task.train, save=False).as_subclass(torch.Tensor)
    params = [p for p in loaded.parameters() if p.requires_grad]
    rows = []
    for number in range(len(task.train)):
        outputs, targets = task.logits(loaded, task.train.batch([number]))
        loss = torch.nn.functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), reduction="sum"
        )
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]))
    right = torch.stack(rows) @ torch.stack(rows).mT
    torch.testing.assert_close(scores, right, rtol=1e-3, atol=1e-4 * float(right.max()))


def test_an_adapter_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    base = save("gpt2", tmp_path / "base")
    folder, _ = adapted("gpt2", tmp_path / "lora", base)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_model.safetensors").rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"adapter of peft .*: there is no adapter_model.safe.*merge"
    ):
        locate(folder)
    (tmp_path / "moved").rename(folder / "adapter_model.safetensors")
    for text, error in [
        ("{}", "base_model_name_or_path"),
        ("[", "Expecting value"),
        (json.dumps({**config, "base_model_name_or_path": "./gone"}), r"no folder '\S*gone'"),
        (json.dumps({**config, "base_model_name_or_path": None}), "cannot be used"),
    ]:
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=error):
            language_model(folder, DOCUMENTS)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with pytest.raises(
        ValueError, match=r"the adapter in '.*lora' cannot be loaded: (?s:.*)size mismatch"
    ):
        language_model(folder, DOCUMENTS).model()


@pytest.mark.parametrize(
    "name", ["./gone", "~/gone-model", "a/b/c", "/gone", "", "here/gone", "file"]
)
def test_what_can_only_be_a_folder_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    rule = re.escape(
        "with a model; give the folder that save_pretrained wrote, or a name on the hub"
    )
    with pytest.raises(ValueError, match=rf"no folder '.*' {rule}.* relative to {tmp_path}"):
        locate(name)
    assert locate("gpt2") == locate("gpt2")
    assert not locate("organization/name").local
