"""Random projections that are never stored: every entry is a function of its name and place."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from isokron.attribution.philox import philox

# Of the mapping from (seed, layer, side, row, column) to entries; a change makes other matrices.
GENERATOR = 1
SIDES = ("output", "input", "flat")
# Consecutive columns of one row that one call of the generator gives.
KINDS = {"rademacher": 128, "normal": 4}
# Calls of the generator at once: its int64 words stay in the cache.
CALLS = 1 << 15
# Entries of a flat projection's matrix that are held at once.
PIECE = 1 << 22


@dataclass(frozen=True)
class Projection:
    """P [p, n] with independent entries of mean 0 and variance 1/p, so that E[PᵀP] = I.

    `dim`: p. Entry (row, column) depends on seed, layer, side, row and column alone: rows of a
    smaller p are the first of a larger one's (but for the scale 1/√p), and any columns can be made
    alone. Kinds: "rademacher" is ±1, the same bits everywhere; "normal" is made in float64, where
    logarithm and cosine may differ in the last place between devices, then rounded to float32,
    which all but never shows that.
    """

    dim: int
    kind: str = "rademacher"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or not 1 <= self.dim < 1 << 32:
            raise ValueError(f"dim must be a whole number of at least 1, got {self.dim!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {tuple(KINDS)}, got {self.kind!r}")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")

    def matrix(
        self,
        layer: str,
        side: str,
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        columns: slice | None = None,
    ) -> Tensor:
        """P [p, size], or only the `columns` of it, scaled by 1/√p."""
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size} for layer {layer!r}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating one, got {dtype}; use torch.float32")
        start, stop, step = (columns or slice(None)).indices(size)
        if step != 1:
            raise ValueError(f"columns must have step 1, got {columns}; slice the result instead")
        wide = torch.promote_types(dtype, torch.float32)
        entries = self._entries(layer, side, start, max(start, stop), wide, torch.device(device))
        return entries.mul_(self.dim**-0.5).to(dtype).contiguous()

    def project_flat(self, layer: str, x: Tensor) -> Tensor:
        """x Pᵀ of flattened gradients, with P of side "flat", made piece by piece. [N, n] → [N, p]

        The sum over layers is one projection of all their gradients side by side. What is computed
        in, and returned, is at least float32.
        """
        if x.ndim != 2 or not x.is_floating_point():
            raise ValueError(
                f"x must be a floating matrix [N, n], got shape {tuple(x.shape)} of {x.dtype} for "
                f"layer {layer!r}; flatten the gradients of every example"
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        result = x.new_zeros(len(x), self.dim, dtype=wide)
        block = KINDS["rademacher"]
        step = max(1, PIECE // (self.dim * block)) * block
        for start in range(0, x.size(1), step):
            part = x[:, start : start + step].to(wide)
            stop = start + part.size(1)
            result.addmm_(part, self._entries(layer, "flat", start, stop, wide, x.device).mT)
        return result.mul_(self.dim**-0.5)

    def to_json(self) -> dict[str, Any]:
        """What makes the same matrices again: the fields, and the version of the generator."""
        return {**asdict(self), "generator": GENERATOR}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "Projection":
        """What `to_json` gave; matrices of another generator are refused."""
        fields = dict(record)
        generator = fields.pop("generator", None)
        if generator != GENERATOR:
            raise ValueError(
                f"projection has generator {generator!r}, and this isokron makes those of "
                f"generator {GENERATOR}; build the store anew"
            )
        return Projection(**fields)

    def _entries(
        self,
        layer: str,
        side: str,
        start: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Columns `start` to `stop`, with variance 1. [p, stop − start]"""
        key = _key(self.seed, layer, side)
        width = KINDS[self.kind]
        first, last = start // width, -(-stop // width)
        blocks = torch.arange(first, last, device=device)
        entries = torch.empty(self.dim, (last - first) * width, dtype=dtype, device=device)
        rows = max(1, CALLS // max(1, last - first))
        for top in range(0, self.dim, rows):
            row = torch.arange(top, min(top + rows, self.dim), device=device)[:, None]
            words = philox((blocks & 0xFFFFFFFF, blocks >> 32, row, torch.zeros_like(row)), key)
            stacked = torch.stack(words, -1)  # [rows, blocks, 4]
            made = _signs(stacked, dtype) if self.kind == "rademacher" else _normals(stacked)
            entries[top : top + rows] = made.reshape(len(row), -1)
        return entries[:, start - first * width : stop - first * width]


def _key(seed: int, layer: str, side: str) -> tuple[int, int]:
    """64 bits of SHA-256, which no two names share in practice."""
    if side not in SIDES:
        raise ValueError(f"side must be one of {SIDES}, got {side!r}")
    text = json.dumps(["isokron projection", GENERATOR, seed, layer, side])
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def _signs(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Bit 0 of a word is its first column: 1 → +1, 0 → −1. [..., 4] → [..., 4 · 32]"""
    shifts = torch.arange(0, 32, 8, device=words.device)
    octets = (words[..., None] >> shifts) & 0xFF
    return _table(dtype, words.device).index_select(0, octets.flatten())


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The eight signs of every byte: one look-up makes eight entries. [256, 8]"""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return (2 * bits - 1).to(dtype)


def _normals(words: Tensor) -> Tensor:
    """Box–Muller: √(−2 ln u) · (cos 2πv, sin 2πv), u in (0, 1), v in [0, 1). [..., 4] → [..., 4]"""
    pairs = words.double().unflatten(-1, (2, 2))  # [..., 2, (u, v)]
    radius = (-2 * torch.log((pairs[..., 0] + 0.5) * 2.0**-32)).sqrt()
    angle = pairs[..., 1] * (2 * torch.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).float()
