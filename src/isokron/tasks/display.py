"""How an example is displayed: pieces of text, an image, a label."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shown:
    """One example: pieces of text, an image, or both.

    tokens: joined, they are the text; where the loss has one term per token, piece k belongs to the
    k-th target.
    context: the text before the first token that has a loss.
    image: uint8 [h, w] or [h, w, 3], or the bytes of a PNG file.
    generated: the tokens were written by the model.
    """

    tokens: tuple[str, ...] = ()
    context: str = ""
    image: Tensor | bytes | None = None
    label: str = ""
    title: str = ""
    generated: bool = False

    @property
    def text(self) -> str:
        """The context and the tokens."""
        return self.context + "".join(self.tokens)

    def image_uri(self) -> str:
        """The image as the source of an <img>, empty if there is none."""
        encoded = self.to_json().get("image")
        return f"data:image/png;base64,{encoded}" if encoded else ""

    def to_json(self) -> dict[str, Any]:
        """Fields as strings, lists and booleans; empty ones are left out."""
        image = self.image if isinstance(self.image, bytes | None) else png(self.image)
        changed = {"tokens": list(self.tokens), "image": base64.b64encode(image or b"").decode()}
        return {name: value for name, value in (vars(self) | changed).items() if value}


def png(image: Tensor) -> bytes:
    """A PNG file of grey levels [h, w] or colours [h, w, 3], uint8."""
    grey, uint8 = image.ndim == 2, str(image.dtype) == "torch.uint8"
    if image.numel() == 0 or not uint8 or not (grey or image.shape[2:] == (3,)):
        raise ValueError(
            f"an image must be uint8 [h, w] or [h, w, 3], got {image.dtype} {list(image.shape)}; "
            "scale it to 0..255, with colours in the last dimension"
        )
    # every row is preceded by the number of its filter, 0 for none
    rows = b"".join(b"\0" + row.numpy().tobytes() for row in image.cpu().contiguous())
    size = struct.pack(">2I5B", image.shape[1], image.shape[0], 8, 0 if grey else 2, 0, 0, 0)
    chunks = (b"IHDR" + size, b"IDAT" + zlib.compress(rows, 9), b"IEND")
    # a signature, then chunks of length, type and data, and checksum
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in chunks
    )
