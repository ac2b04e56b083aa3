"""Scores by kronfluence's Analyzer, from files to files, as its own example for GPT-2 does it.

    python benchmarks/kronfluence_scores.py MODEL TRAIN.jsonl QUERIES.jsonl OUT [--batch 32]

One of the contestants of benchmarks/attribution.py: it needs transformers and kronfluence alone.
OUT/scores.safetensors has `scores` [queries, documents]. With --also-damping, scores with another
damping factor are written beside them.
"""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn


def package(name: str) -> Any:
    """Its types are not known where it is not installed."""
    return importlib.import_module(name)


def with_linear_(model: nn.Module) -> nn.Module:
    """It knows no Conv1D: GPT-2's layers become linear ones, as in its example."""
    conv = package("transformers.pytorch_utils").Conv1D
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, conv):
                weight, bias = child.weight, child.bias
                assert isinstance(weight, Tensor)
                assert isinstance(bias, Tensor)
                linear = nn.Linear(*weight.shape)
                linear.weight.data.copy_(weight.data.T)
                linear.bias.data.copy_(bias.data)
                setattr(module, name, linear)
    return model


def encoded(path: Path, tokenizer: Any) -> list[dict[str, Tensor]]:
    """Padded to the longest of all, which its data loader can stack."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    found = tokenizer(texts, padding=True, return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return [{name: found[name][i] for name in names} for i in range(len(texts))]


def task(layers: list[str]) -> Any:
    base: Any = package("kronfluence.task").Task

    class Language(base):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            targets = batch["input_ids"][:, 1:].masked_fill(
                batch["attention_mask"][:, 1:] == 0, -100
            )
            if sample:
                drawn = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
                targets = drawn.where(targets.flatten() != -100, -100)
            return F.cross_entropy(logits, targets.flatten(), reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str]:
            return layers

        def get_attention_mask(self, batch: Any) -> Tensor:
            return batch["attention_mask"]

    return Language()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "train", "queries", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--also-damping", type=float)
    args = parser.parse_args()
    transformers = package("transformers")
    arguments = package("kronfluence.arguments")
    analyzer = package("kronfluence.analyzer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = with_linear_(transformers.AutoModelForCausalLM.from_pretrained(args.model))
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("transformer.h.")
    ]
    language = task(layers)
    train, queries = (encoded(path, tokenizer) for path in (args.train, args.queries))
    model = analyzer.prepare_model(model.eval(), language)
    run = analyzer.Analyzer(
        "scores", model, language, cpu=True, output_dir=str(args.out), disable_tqdm=True
    )
    run.fit_all_factors(
        "ekfac",
        train,
        per_device_batch_size=args.batch,
        factor_args=arguments.FactorArguments(strategy="ekfac", use_empirical_fisher=True),
    )
    # None: 0.1 of the mean eigenvalue
    wanted = {"scores": None} | ({"other": args.also_damping} if args.also_damping else {})
    found = {}
    for name, damping in wanted.items():
        run.compute_pairwise_scores(
            name,
            "ekfac",
            query_dataset=queries,
            train_dataset=train,
            per_device_query_batch_size=len(queries),
            per_device_train_batch_size=args.batch,
            score_args=arguments.ScoreArguments(damping_factor=damping),
        )
        found[name] = run.load_pairwise_scores(name)["all_modules"].float().contiguous()
    save_file(found, args.out / "scores.safetensors")


if __name__ == "__main__":
    main()
