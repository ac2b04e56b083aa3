"""What a person sees of an example, and its way through JSON."""

import base64
import json
import struct
import zlib

import pytest
import torch

from isokron.tasks import Shown
from isokron.tasks.task import png


def decoded(file):
    """Width, height, colour type and pixels of a PNG whose rows have no filter."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    parts, at = {}, 8
    while at < len(file):
        (length,) = struct.unpack(">I", file[at : at + 4])
        part = file[at + 4 : at + 8 + length]
        assert struct.unpack(">I", file[at + 8 + length : at + 12 + length]) == (zlib.crc32(part),)
        parts[part[:4]] = part[4:]
        at += 12 + length
    assert list(parts) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">2I5B", parts[b"IHDR"])
    assert (depth, rest) == (8, [0, 0, 0])
    rows = zlib.decompress(parts[b"IDAT"])
    stride = len(rows) // height
    assert {rows[i * stride] for i in range(height)} == {0}
    return (
        width,
        height,
        colour,
        [list(rows[i * stride + 1 : (i + 1) * stride]) for i in range(height)],
    )


def test_text_survives_json_exactly():
    shown = Shown(
        tokens=("wa", "", "r — ½\n"), context="\ufffd<b>", label="7", title="1861 Lincoln",
        generated=True,
    )  # fmt: skip
    saved = json.loads(json.dumps(shown.to_json()))
    assert Shown(**saved | {"tokens": tuple(saved["tokens"])}).to_json() == shown.to_json()
    assert shown.text == "\ufffd<b>war — ½\n"


def test_nothing_shown_is_an_empty_object():
    assert Shown().to_json() == {}


def test_an_image_is_written_as_a_png_file():
    shown = Shown(image=torch.arange(6, dtype=torch.uint8).view(2, 3), label="3")
    encoded = base64.b64encode(png(shown.image)).decode()
    assert shown.to_json() == {"image": encoded, "label": "3"}


@pytest.mark.parametrize(("shape", "colour"), [((2, 3), 0), ((2, 3, 3), 2)])
def test_png_holds_every_pixel(shape, colour):
    image = torch.arange(250, 250 + 18).remainder(256).to(torch.uint8)[: torch.Size(shape).numel()]
    image = image.view(shape)
    assert decoded(png(image)) == (3, 2, colour, image.flatten(1).tolist())


def test_png_takes_images_that_lie_transposed_in_memory():
    image = torch.arange(6, dtype=torch.uint8).view(2, 3).T
    assert decoded(png(image))[3] == image.tolist()


@pytest.mark.parametrize("image", [torch.zeros(2, 3), torch.zeros(3, 2, 2, dtype=torch.uint8)])
def test_other_images_are_refused_with_type_and_shape(image):
    with pytest.raises(
        ValueError, match=r"uint8 \[h, w\] or \[h, w, 3\], got torch\..* \[.*\]; scale"
    ):
        png(image)
