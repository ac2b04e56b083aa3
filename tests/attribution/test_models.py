"""Attribution of Hugging Face models end to end, with tiny random weights."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron import Attributor
from isokron.attribution import read_queries
from isokron.tasks.huggingface import classifier, language_model

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from tiny_models import BERT, DOCUMENTS, GPT2, LLAMA, byte_pairs, save  # noqa: E402

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
    "llama": Case("Llama", LLAMA, 0.6),
    "gpt-neox": Case("GPTNeoX", {**LLAMA, "use_cache": False}, 0.6),
    "mistral": Case("Mistral", LLAMA, 0.6),
    "qwen2": Case("Qwen2", LLAMA, 0.6),
    "gemma": Case("Gemma", {**LLAMA, "head_dim": 8}, 1.0, set()),
    "opt": Case(
        "OPT",
        {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32},
        0.85,
        {"OPTLearnedPositionalEmbedding"},
    ),
    "mixtral": Case(
        "Mixtral", {**LLAMA, **MOE, "num_local_experts": 8, "intermediate_size": 208}, 0.97
    ),
    "qwen2-moe": Case(
        "Qwen2Moe",
        {
            **LLAMA,
            **MOE,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 208,
            "shared_expert_intermediate_size": 24,
        },
        0.97,
    ),
    "mamba": Case(
        "Mamba",
        {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        0.5,
        {"MambaMixer", "its module is not called"},
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


def rows(count: int, make: Any) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [make() for _ in range(count)]


def tokens_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean loss of the labels of each example."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs).logits
    terms = nn.functional.cross_entropy(logits.movedim(-1, 1), batch["labels"], reduction="none")
    return terms.flatten(1).mean(1) if terms.ndim > 1 else terms


def t5() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, use_cache=False
    )
    make = lambda: {  # noqa: E731
        "input_ids": torch.randint(3, 40, (6,)),
        "decoder_input_ids": torch.randint(3, 40, (4,)),
        "labels": torch.randint(3, 40, (4,)),
    }
    return transformers.T5ForConditionalGeneration(config), rows(8, make)


def vit() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    sizes = {key: value for key, value in BERT.items() if key not in ("vocab_size", "id2label")}
    config = transformers.ViTConfig(**{**sizes, "image_size": 8, "patch_size": 4})
    make = lambda: {  # noqa: E731
        "pixel_values": torch.randn(3, 8, 8),
        "labels": torch.randint(2, ()),
    }
    return transformers.ViTForImageClassification(config), rows(8, make)


def lora() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, use_cache=False))
    model = peft.get_peft_model(model, settings)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # begins at 0
            nn.init.normal_(param)
    make = lambda: {  # noqa: E731
        "input_ids": torch.randint(300, (6,)),
        "labels": torch.randint(300, (6,)),
    }
    return model, rows(8, make)


MODELS = {
    "t5": (t5, 0.8, {"embedding"}),
    "vit": (vit, 0.9, {"ViTEmbeddings"}),
    "lora": (lora, 0.01, {"embedding", "frozen"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_loss_of_ones_own(name: str, tmp_path: Path) -> None:
    make, share, left_out = MODELS[name]
    torch.manual_seed(0)
    model, data = make()
    trained = [param.requires_grad for param in model.parameters()]
    a = Attributor(tmp_path, model, data, loss=tokens_loss).fit()
    assert {item.reason for item in a.selection.left_out} == left_out
    assert a.selection.covered / a.selection.total >= share
    check_own(a.score(data[:3], unit=True), [0, 1, 2])
    assert a.report().exists()
    assert [param.requires_grad for param in model.parameters()] == trained
