"""Fine-tune LoRA pairs with TRL's SFTTrainer and PEFT, on a model and tokenizer made on the spot.

    python examples/finetune_lora.py [--steps 60] [--muon]

SFTTrainer adds the LoRA pairs to the model itself, so that the optimizer must be made after that:
`optimizer_cls_and_kwargs` takes a function that returns one that makes the optimizer of a model.
LoRA pairs go to AdamW by default; `--muon` gives them to Muon.
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

import isokron

COLOURS = {"apple": "red", "lemon": "yellow", "leaf": "green", "sky": "blue", "plum": "purple"}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_optimizer(optimizer: Any, **routing: Any) -> Any:
    """For `optimizer_cls_and_kwargs`, whose function is called first, and then with the model."""

    def of_model(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
        groups = isokron.param_groups(model, **routing)
        print(isokron.describe(groups))
        return optimizer(groups, **settings)

    return lambda: of_model


def train(model: Any, texts: list[dict[str, str]], steps: int, **settings: Any) -> Any:
    arguments = SFTConfig(
        tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=5,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),  # the default is True
        max_length=64,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = {"train_dataset": Dataset.from_list(texts), "processing_class": make_tokenizer()}
    trainer = SFTTrainer(model, arguments, **data, **settings)
    trainer.train()
    for record in trainer.state.log_history:
        if "loss" in record:
            print(f"step {record['step']:4}  loss {float(record['loss']):.4f}")
    return trainer.model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--muon", action="store_true", help="Muon for LoRA pairs, not AdamW")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    facts = [{"text": f"The {name} is {colour}."} for name, colour in COLOURS.items()]
    soap = make_optimizer(isokron.SOAP), {"lr": 5e-3}
    model = train(LlamaForCausalLM(config), facts, 40, optimizer_cls_and_kwargs=soap)

    print("with LoRA, on questions and answers; only answers count")
    questions = [
        {"prompt": f"Which colour has the {name}?", "completion": f" {colour}"}
        for name, colour in COLOURS.items()
    ]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    muon = make_optimizer(isokron.Muon, method=["*lora_*"])
    adapt = muon if args.muon else make_optimizer(isokron.AdamW), {"lr": 1e-2}
    train(model, questions, args.steps, peft_config=lora, optimizer_cls_and_kwargs=adapt)


if __name__ == "__main__":
    main()
