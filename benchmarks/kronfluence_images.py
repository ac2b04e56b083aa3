"""EK-FAC scores by kronfluence of a perceptron, from one file of tensors to another.

    python benchmarks/kronfluence_images.py IN.safetensors OUT.safetensors

The peer of benchmarks/lds.py, run in an environment of its own: it needs kronfluence alone. IN has
the weights of an nn.Sequential by name, and `train.x`, `train.y`, `query.x`, `query.y`. OUT has
scores [draws, queries, examples] for labels of the data and for drawn ones ("empirical", and
"sampled" of three draws), each with 0.1 of the mean eigenvalue as damping ("relative") and with its
default ("absolute").
"""

import argparse
import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def package(name: str) -> Any:
    """Its types are not known where it is not installed."""
    return importlib.import_module(name)


def perceptron(weights: dict[str, Tensor]) -> nn.Sequential:
    """Linear layers as these weights have them, with ReLU between."""
    shapes = [weight.shape for name, weight in weights.items() if name.endswith("weight")]
    layers: list[nn.Module] = []
    for outputs, inputs in shapes:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    model.load_state_dict(weights)
    return model.eval()


def task() -> Any:
    base: Any = package("kronfluence.task").Task

    class Images(base):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            images, targets = batch
            logits = model(images)
            if sample:
                targets = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
            return F.cross_entropy(logits, targets, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    return Images()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("given", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    arguments = package("kronfluence.arguments")
    analyzer = package("kronfluence.analyzer")
    tensors = load_file(args.given)
    data = {
        name: torch.utils.data.TensorDataset(tensors.pop(f"{name}.x"), tensors.pop(f"{name}.y"))
        for name in ("train", "query")
    }
    names = sorted(tensors, key=lambda name: int(name.split(".")[0]))
    images = task()
    model = analyzer.prepare_model(perceptron({name: tensors[name] for name in names}), images)
    found: dict[str, list[Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = analyzer.Analyzer("lds", model, images, cpu=True, output_dir=folder)
        for fisher, draw in (("empirical", 0), ("sampled", 0), ("sampled", 1), ("sampled", 2)):
            torch.manual_seed(draw)
            factors = f"{fisher}_{draw}"
            how = arguments.FactorArguments(
                strategy="ekfac", use_empirical_fisher=fisher == "empirical"
            )
            run.fit_all_factors(factors, data["train"], per_device_batch_size=512, factor_args=how)
            # None: 0.1 of the mean eigenvalue
            for name, damping in (("relative", None), ("absolute", 1e-8)):
                run.compute_pairwise_scores(
                    f"{factors}_{name}",
                    factors,
                    query_dataset=data["query"],
                    train_dataset=data["train"],
                    per_device_query_batch_size=len(data["query"]),
                    per_device_train_batch_size=512,
                    score_args=arguments.ScoreArguments(damping_factor=damping),
                )
                scores = run.load_pairwise_scores(f"{factors}_{name}")["all_modules"]
                found.setdefault(f"{fisher} {name}", []).append(scores.float())
    save_file({name: torch.stack(each) for name, each in found.items()}, args.out)


if __name__ == "__main__":
    main()
