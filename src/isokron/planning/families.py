"""Well-known models as shapes: one table of published dimensions, made on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Dimensions:
    """Of a decoder: `grouped` is the width of its keys and of its values, `positions` the learned
    ones (GPT-2), which come with biases, a fused projection, and a head tied to the embedding."""

    layers: int
    width: int
    feed: int
    vocabulary: int
    grouped: int
    positions: int = 0


FAMILIES = {
    # Radford et al., 2019
    "gpt2": Dimensions(12, 768, 3072, 50257, 768, 1024),
    "gpt2-medium": Dimensions(24, 1024, 4096, 50257, 1024, 1024),
    "gpt2-large": Dimensions(36, 1280, 5120, 50257, 1280, 1024),
    "gpt2-xl": Dimensions(48, 1600, 6400, 50257, 1600, 1024),
    # Touvron et al., 2302.13971 and 2307.09288
    "llama-7b": Dimensions(32, 4096, 11008, 32000, 4096),
    "llama-13b": Dimensions(40, 5120, 13824, 32000, 5120),
    "llama-70b": Dimensions(80, 8192, 28672, 32000, 1024),
    # Jiang et al., 2310.06825
    "mistral-7b": Dimensions(32, 4096, 14336, 32000, 1024),
    # Grattafiori et al., 2407.21783
    "llama3-8b": Dimensions(32, 4096, 14336, 128256, 1024),
    "llama3-70b": Dimensions(80, 8192, 28672, 128256, 1024),
}


def make_family(name: str) -> nn.Module:
    """A model of the table: its modules and shapes, without a forward pass."""
    at = FAMILIES[name]
    with torch.device("meta"):
        return _gpt2(at) if at.positions else _llama(at)


def _gpt2(at: Dimensions) -> nn.Module:
    def block() -> nn.Module:
        return nn.ModuleDict(
            {
                "attention_norm": nn.LayerNorm(at.width),
                "query_key_value": nn.Linear(at.width, at.width + 2 * at.grouped),
                "out": nn.Linear(at.width, at.width),
                "feed_norm": nn.LayerNorm(at.width),
                "up": nn.Linear(at.width, at.feed),
                "down": nn.Linear(at.feed, at.width),
            }
        )

    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(at.vocabulary, at.width),
            "positions": nn.Embedding(at.positions, at.width),
            "blocks": nn.ModuleList(block() for _ in range(at.layers)),
            "norm": nn.LayerNorm(at.width),
        }
    )


def _llama(at: Dimensions) -> nn.Module:
    def linear(inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=False)

    def block() -> nn.Module:
        return nn.ModuleDict(
            {
                "attention_norm": nn.RMSNorm(at.width),
                "query": linear(at.width, at.width),
                "key": linear(at.width, at.grouped),
                "value": linear(at.width, at.grouped),
                "out": linear(at.width, at.width),
                "feed_norm": nn.RMSNorm(at.width),
                "gate": linear(at.width, at.feed),
                "up": linear(at.width, at.feed),
                "down": linear(at.feed, at.width),
            }
        )

    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(at.vocabulary, at.width),
            "blocks": nn.ModuleList(block() for _ in range(at.layers)),
            "norm": nn.RMSNorm(at.width),
            "head": linear(at.width, at.vocabulary),
        }
    )
