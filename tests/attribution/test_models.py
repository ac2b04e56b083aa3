"""Attribution of Hugging Face models end to end, with tiny random weights."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isokron import Attributor
from isokron.attribution import read_queries
from isokron.tasks.huggingface import classifier, language_model

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from tiny_models import DOCUMENTS, GPT2, LLAMA, byte_pairs, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")


@dataclass(frozen=True)
class Case:
    """share: least part of the parameters that is covered; left_out: all reasons."""

    name: str
    options: dict[str, Any]
    share: float
    left_out: set[str] = field(default_factory=lambda: {"embedding"})


MOE = {"vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
CASES = {
    "gpt2": Case("GPT2", GPT2, 0.9),
    "mixtral": Case(
        "Mixtral", {**LLAMA, **MOE, "num_local_experts": 8, "intermediate_size": 208}, 0.97
    ),
}


def trained_on_nothing(case: Case, folder: Path) -> Path:
    """A folder with a random model; norms differ from 1 and biases from 0."""
    torch.manual_seed(0)
    marks = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, f"{case.name}Config")(**{**case.options, **marks})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for param in model.parameters():
        param.data.add_(0.05 * torch.randn_like(param))
    model.save_pretrained(folder)
    byte_pairs(eos_token="<end>").save_pretrained(folder)
    return folder


def check_own(scores: Tensor, numbers: list[int]) -> None:
    """Every query is a training example, which explains itself best."""
    values = scores.as_subclass(Tensor)
    for row, number in zip(values, numbers, strict=True):
        assert float(row[number]) == pytest.approx(1.0, abs=1e-3)
        assert float(row[number]) >= float(row.max()) - 1e-3


@pytest.mark.parametrize("name", CASES)
def test_a_causal_language_model_explains_its_documents_by_themselves(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = trained_on_nothing(case, tmp_path / "model")
    task = language_model(folder, DOCUMENTS, evaluation=0)
    # by single documents, of which some send no token to an expert
    a = Attributor(tmp_path / "run", task.model(), task=task, batch_size=1)
    selection = a.selection
    assert {item.reason for item in selection.left_out} == case.left_out
    assert selection.covered / selection.total >= case.share
    a.fit()
    queries = read_queries(task, a.subject.model, ["train:0", "train:3"], ids=a.data.ids)
    check_own(a.score(queries, unit=True, save=False), [0, 3])
    scores = a.score(queries, by_layer=True)
    right = scores.as_subclass(Tensor)
    tolerance = 1e-3 * float(right.abs().max())
    torch.testing.assert_close(scores.by_layer.sum(1), right, rtol=0, atol=tolerance)
    number = scores.top(1)[0].proponents[0].example
    tokens = sum(scores.tokens[0][number])
    assert tokens == pytest.approx(float(scores[0, number]), rel=1e-2)
    assert a.report().exists()


def test_a_classifier_of_texts(tmp_path: Path) -> None:
    task = classifier(save("bert", tmp_path / "model"), DOCUMENTS, evaluation=0)
    a = Attributor(tmp_path / "run", task.model(), task=task).fit("ekfac")
    assert {item.reason for item in a.selection.left_out} == {"embedding"}
    queries = read_queries(task, a.subject.model, ["train:1", "train:2"], ids=a.data.ids)
    check_own(a.score(queries, unit=True), [1, 2])
    assert a.report().exists()
