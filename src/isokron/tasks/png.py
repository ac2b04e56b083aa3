"""Images as PNG, which every browser shows, without an imaging library."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def png(image: Tensor) -> bytes:
    """A PNG file of grey levels [h, w] or colours [h, w, 3], uint8."""
    grey = image.ndim == 2
    if (
        image.numel() == 0
        or str(image.dtype) != "torch.uint8"
        or not (grey or image.shape[2:] == (3,))
    ):
        raise ValueError(
            f"an image must be uint8 [h, w] or [h, w, 3], got {image.dtype} {list(image.shape)}; "
            "bring it to 0..255, with colours in the last dimension"
        )
    # every row is preceded by the number of its filter, 0 for none
    rows = b"".join(b"\0" + row.numpy().tobytes() for row in image.cpu().contiguous())
    size = struct.pack(">2I5B", image.shape[1], image.shape[0], 8, 0 if grey else 2, 0, 0, 0)
    parts = (b"IHDR" + size, b"IDAT" + zlib.compress(rows, 9), b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
        for part in parts
    )


def data_uri(file: bytes) -> str:
    """What an <img> may have as its source, with the whole PNG inside."""
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
