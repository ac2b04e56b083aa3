"""A tiny task of words, with everything a run can use; it needs no data of any package."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution import Attributor
from isokron.tasks import Examples, Shown, Task

LETTERS = " abcdefgh"


class Model(nn.Module):
    """Letters [N, S] → logits [N, S, 9]; later letters see earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.mix, self.head = nn.Linear(6, 8), nn.Linear(8, 9, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.norm(self.table(letters)).cumsum(1)
        return self.head(self.mix(x).tanh())


def logits(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    (letters,) = batch
    return model(letters[:, :-1]), letters[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    scores, targets = logits(model, batch)
    terms = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return terms.view_as(targets).mean(1)


def show(batch: tuple[Tensor, ...]) -> list[Shown]:
    return [
        Shown(
            tokens=tuple(LETTERS[i] for i in row[1:].tolist()),
            context=LETTERS[int(row[0])],
            title="a < b",
        )
        for row in batch[0]
    ]


def read(text: str) -> tuple[Tensor, ...]:
    return (torch.tensor([[LETTERS.index(letter) for letter in text]]),)


def task() -> Task:
    letters = torch.randint(0, 9, (40, 6), generator=torch.Generator().manual_seed(0))
    return Task(
        name="letters",
        model=Model,
        train=Examples((letters[:32],)),
        evaluation=Examples((letters[32:],)),
        loss=loss,
        batch_size=5,
        logits=logits,
        show=show,
        read=read,
        ids=[f"row {i}" for i in range(32)],
    )


def attributor(folder: Path | str, seed: int = 0, **options: Any) -> Attributor:
    """A run on the task with a random model, all layers and batches of five."""
    torch.manual_seed(seed)
    options = {"task": task(), "layers": "*", "batch_size": 5, **options}
    return Attributor(folder, Model(), **options)
