"""Which training examples caused this? Three models, three kinds of data, the same ten lines.

    python examples/explain.py [folder]

A perceptron on a list of tuples, a convolutional network on a DataLoader, and a Hugging Face
language model on a list of dicts. Each leaves a page, report.html, in a folder of its own.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import isokron


def train_(model: nn.Module, loader: Any, loss: Any, epochs: int = 4) -> None:
    optimizer = isokron.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in loader:
            result = loss(model, batch)  # losses, or losses and their weights
            terms, weights = result if isinstance(result, tuple) else (result, torch.ones(()))
            ((terms * weights).sum() / weights.expand_as(terms).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()


def digits() -> tuple[Tensor, Tensor]:
    images, labels = isokron.tasks.load("digits").train.tensors
    return images[:400], labels[:400]


def perceptron(folder: Path) -> Any:
    images, labels = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    train_set: Any = list(zip(images, labels, strict=True))
    loss = isokron.losses.CrossEntropy()
    train_(model, DataLoader(train_set, 32, shuffle=True), loss)

    a = isokron.Attributor(folder, model, train_set, loss=loss)
    a.fit("ekfac")
    scores = a.score(train_set[:2])  # a tensor [queries, examples]
    a.report()
    return scores


def convolutions(folder: Path) -> Any:
    images, labels = digits()
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )
    loader = DataLoader(TensorDataset(images, labels), batch_size=50, shuffle=True)
    loss = isokron.losses.CrossEntropy()
    train_(model, loader, loss)

    a = isokron.Attributor(folder, model, loader, loss=loss)
    a.fit("kfac")
    a.build(dim=16)  # a compressed gradient store: queries need no pass over the data any more
    scores = a.score([(images[3], labels[3])])
    a.report()
    return scores


def language_model(folder: Path) -> Any:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2))
    train_set: Any = [{"input_ids": torch.randint(0, 50, (16,))} for _ in range(60)]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # one per example
        tokens = batch["input_ids"]
        logits = model(input_ids=tokens).logits[:, :-1].mT
        return nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").sum(1)

    train_(model, DataLoader(train_set, 20), loss)

    a = isokron.Attributor(folder, model, train_set, loss=loss)
    a.fit("kfac")
    scores = a.score(train_set[:1])
    a.report()
    return scores


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    torch.manual_seed(0)
    for explain in (perceptron, convolutions, language_model):
        scores = explain(folder / explain.__name__)
        best = [f"{example.id} ({example.score:.3g})" for example in scores.top(3)[0].proponents]
        print(f"{explain.__name__}: {', '.join(best)}")
    print(f"Pages: {folder}/*/report.html")


if __name__ == "__main__":
    main()
