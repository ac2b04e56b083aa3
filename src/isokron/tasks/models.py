"""The two small models of the built-in tasks, written out plainly."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, arange, nn


class ConvNet(nn.Module):
    """Images [n, 1, side, side] → class scores [n, classes].

    Stride-2 convolutions halve the image until it is 4×4, then two linear layers.
    """

    def __init__(self, side: int, width: int, hidden: int, classes: int = 10) -> None:
        super().__init__()
        stride = 1 if side <= 8 else 2  # full resolution only where it is cheap
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, stride, padding=1)]
        channels, side = width, (side + stride - 1) // stride
        while side > 4:
            layers += [nn.GroupNorm(4, channels), nn.GELU()]
            layers += [nn.Conv2d(channels, 2 * width, 3, stride=2, padding=1)]
            channels, side = 2 * width, (side + 1) // 2
        layers += [nn.GroupNorm(4, channels), nn.GELU()]
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Linear(channels * side * side, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images).flatten(1)
        return self.head(F.gelu(self.hidden(features)))


class Block(nn.Module):
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
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))

    def attend(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [n, heads, length, width/h]

        mixed = F.scaled_dot_product_attention(
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
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            # large enough that the first blocks' sums do not drown the token itself
            nn.init.normal_(embedding.weight, std=0.3)
        nn.init.normal_(self.head.weight, std=0.02)  # starts near the uniform guess, ln 256 nats
        for block in self.blocks:
            assert isinstance(block, Block)
            for linear in (block.out, block.down):
                # 2·layers branches add up; keep the variance of their sum at one branch's
                linear.weight.data.div_((2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        # asked for once an example, so that curvature sees the gradient of each
        positions = arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
