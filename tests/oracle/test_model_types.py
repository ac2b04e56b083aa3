"""Architectures of transformers against autograd: equal to the oracle, or left out by name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autograd_oracle import Case, check, drawn
from isokron.curvature import CrossEntropy
from tiny_text_config import TEXT, VOCABULARY

transformers = pytest.importorskip("transformers")

LABELS = 4
SHARED = "cannot be told apart by example"  # all examples have the same positions


@dataclass(frozen=True)
class Architecture:
    """left_out: parts of the names of layers that are left out, and of the reasons."""

    model: str
    options: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict)
    inputs: str = "tokens"


MODELS = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16},
        {"transformer.wpe": SHARED},
    ),
    "llama": Architecture("LlamaForCausalLM", TEXT),
    "llama, tied": Architecture("LlamaForCausalLM", {**TEXT, "tie_word_embeddings": True}),
    "gpt-neox": Architecture("GPTNeoXForCausalLM", TEXT),
    "qwen2": Architecture("Qwen2ForCausalLM", TEXT),
    "qwen3": Architecture("Qwen3ForCausalLM", {**TEXT, "head_dim": 4}),
    "gemma2": Architecture("Gemma2ForCausalLM", {**TEXT, "head_dim": 4}),
    "opt": Architecture(
        "OPTForCausalLM",
        {**TEXT, "ffn_dim": 12, "word_embed_proj_dim": 8},
        {"model.decoder.embed_positions": "OPTLearnedPositionalEmbedding"},
    ),
    "falcon": Architecture("FalconForCausalLM", TEXT),
    "mamba": Architecture(
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4},
        {
            **{f"backbone.layers.{i}.mixer": "MambaMixer" for i in (0, 1)},
            **{f"backbone.layers.{i}.mixer.conv1d": "its module is not called" for i in (0, 1)},
            **{f"backbone.layers.{i}.mixer.dt_proj": "its module is not called" for i in (0, 1)},
        },
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "qwen2-moe": Architecture(
        "Qwen2MoeForCausalLM",
        {
            **TEXT,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 12,
        },
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
        {f"model.layers.{i}.self_attn": "GptOssAttention" for i in (0, 1)},
    ),
    "bert": Architecture(
        "BertForSequenceClassification",
        {**TEXT, "num_labels": LABELS},
        {"bert.embeddings.position_embeddings": SHARED},
        "labels",
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 8,
            "d_kv": 4,
            "d_ff": 12,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        {
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "",
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias": "",
        },
        "pairs",
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 12,
            "decoder_ffn_dim": 12,
            "num_mel_bins": 4,
            "max_source_positions": 6,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        {
            "model.encoder.embed_positions": SHARED,
            "model.decoder.embed_positions": "WhisperPositionalEmbedding",
        },
        "speech",
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        {**TEXT, "image_size": 8, "patch_size": 4, "num_labels": LABELS},
        {"vit.embeddings": "ViTEmbeddings"},
        "images",
    ),
    "clip": Architecture(
        "CLIPForImageClassification",
        {
            "vision_config": {**TEXT, "image_size": 8, "patch_size": 4, "projection_dim": 8},
            "num_labels": LABELS,
        },
        {
            "vision_model.embeddings": "CLIPVisionEmbeddings",
            "vision_model.embeddings.position_embedding": SHARED,
            "vision_model.post_layernorm": "not used by the loss",
        },
        "images",
    ),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        {
            "hidden_sizes": [4, 6],
            "depths": [1, 1],
            "num_stages": 2,
            "patch_size": 2,
            "image_size": 8,
            "num_labels": LABELS,
        },
        {
            **{f"convnext.encoder.stages.{i}.layers.0": "ConvNextLayer" for i in (0, 1)},
            "convnext.embeddings.layernorm": "off autograd's",
            "convnext.encoder.stages.1.downsampling_layer.0": "off autograd's",
        },
        "images",
    ),
}


def outputs(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs = {key: value for key, value in batch.items() if key != "targets"}
    return model(**inputs).logits, batch["targets"]


def by_terms(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return CrossEntropy(outputs)(model, batch)


def by_example(model: nn.Module, batch: Any) -> Tensor:
    terms, weights = by_terms(model, batch)
    return (terms * weights).sum(1) if terms.ndim > 1 else terms


LOSSES = {"example": by_example, "terms": by_terms, "likelihood": CrossEntropy(outputs)}


def example(kind: str, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    words = torch.randint(3, VOCABULARY, (length,))
    label = torch.randint(LABELS, ())
    if kind == "images":
        return {"pixel_values": torch.randn(3, 8, 8, dtype=dtype), "targets": label}
    if kind == "speech":
        speech = torch.randn(4, 12, dtype=dtype)
        return {"input_features": speech, "decoder_input_ids": words, "targets": words.flip(0)}
    ones = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if kind == "labels":
        return {**ones, "targets": label}
    if kind == "pairs":
        return {**ones, "decoder_input_ids": words[:-1].flip(0), "targets": words[1:]}
    targets = words.roll(-1)
    targets[-1] = -100
    return {**ones, "targets": targets}


def padded(examples: list[dict[str, Tensor]], more: int) -> dict[str, Tensor]:
    """Words are padded on the right, by `more` positions than the longest has."""
    batch = {}
    for key in examples[0]:
        rows = [x[key] for x in examples]
        if rows[0].ndim == 1:
            size, value = more + max(map(len, rows)), -100 if key == "targets" else 0
            rows = [functional.pad(row, (0, size - len(row)), value=value) for row in rows]
        batch[key] = torch.stack(rows)
    return batch


def built(name: str) -> Case:
    case, options = MODELS[name], drawn(name)
    torch.manual_seed(0)
    kind = getattr(transformers, case.model)
    model = kind(kind.config_class(**case.options)).to(options["dtype"])
    for param in model.parameters():  # norms are neither 0 nor 1, biases not 0
        param.data.add_(0.1 * torch.randn_like(param))
    if hasattr(model, "set_experts_implementation"):  # others are not for float64
        model.set_experts_implementation("eager")
    if options["frozen"]:
        next(model.parameters()).requires_grad_(False)
    model.train()  # dropout is off in the passes all the same
    sizes = (3, 5, 2, 4, 6, 5)
    examples: list[Any] = [example(case.inputs, size, options["dtype"]) for size in sizes]
    keywords = {"batch_size": options["batch_size"], "layers": "*"}
    collate = lambda xs: padded(xs, options["more"])  # noqa: E731
    return Case(model, examples, LOSSES[options["loss"]], collate, case.left_out, keywords)


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_autograd(name: str, tmp_path: Path) -> None:
    check(built(name), tmp_path)
