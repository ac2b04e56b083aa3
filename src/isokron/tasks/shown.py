"""What a person sees of one example."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isokron.tasks.png import data_uri, png

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shown:
    """One example: pieces of text, an image, or both.

    tokens: together they are the text; where the loss has one term a token, piece k belongs to the
    k-th target.
    context: what comes before the first token that has a loss.
    image: uint8 [h, w] or [h, w, 3], or a PNG file's bytes.
    """

    tokens: tuple[str, ...] = ()
    context: str = ""
    image: Tensor | bytes | None = None
    label: str = ""
    title: str = ""

    @property
    def text(self) -> str:
        """All that can be read, context included."""
        return self.context + "".join(self.tokens)

    def png(self) -> bytes | None:
        """The image as a PNG file."""
        return (
            self.image if self.image is None or isinstance(self.image, bytes) else png(self.image)
        )

    def image_uri(self) -> str:
        """The image as the source of an <img>, empty if there is none."""
        file = self.png()
        return "" if file is None else data_uri(file)

    def to_json(self) -> dict[str, Any]:
        """Strings and lists only, for json.dump; fields that are empty are left out."""
        file = self.png()
        fields = {
            "tokens": list(self.tokens),
            "context": self.context,
            "image": "" if file is None else base64.b64encode(file).decode(),
            "label": self.label,
            "title": self.title,
        }
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Shown:
        """The inverse of to_json, but that an image stays a PNG."""
        image = base64.b64decode(fields["image"]) if "image" in fields else None
        strings = {name: fields.get(name, "") for name in ("context", "label", "title")}
        return cls(tokens=tuple(fields.get("tokens", ())), image=image, **strings)
