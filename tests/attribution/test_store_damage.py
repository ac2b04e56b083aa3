"""A store that is not whole, or not the one it says, is found out, by name and with a remedy."""

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_store import WIDTH, begin, build, contents, fill

from isokron.attribution.store import Store, checksum

SHARD = "shard-00001.safetensors"
AGAIN = "run the same build command again"
REBUILD = r"build again \(isokron build\) to write this shard anew"


def flip(path: Path, place: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def refused(folder: Path, message: str, verify: bool = False) -> None:
    with pytest.raises(ValueError, match=message):
        Store.open(folder, verify)


def test_a_truncated_shard_is_told(tmp_path: Path) -> None:
    build(tmp_path)
    os.truncate(tmp_path / SHARD, (tmp_path / SHARD).stat().st_size - 1)
    refused(tmp_path, f"{SHARD} is damaged: .*; {REBUILD}")


def test_every_flipped_bit_is_found_when_all_bytes_are_verified(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / SHARD
    size = path.stat().st_size
    for place in [*range(0, size, 17), size - 1]:
        flip(path, place)
        refused(tmp_path, f"{SHARD} (is damaged|belongs to another)", verify=True)
        assert [span.number for span in begin(tmp_path).missing()] == [1]
        flip(path, place)
    Store.open(tmp_path, verify=True)


def result_or_error(reader: Callable[[], object]) -> str:
    try:
        return str(reader())
    except ValueError as error:
        return str(error)


def test_bytes_that_changed_are_found_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # two rows have a checksum together, and four are read at a time, or one
    monkeypatch.setattr("isokron.attribution.store.CHECKED", 2 * WIDTH * 4)
    store = build(tmp_path)
    readers: list[Callable[[], object]] = [
        lambda: [list(store.blocks(rows * WIDTH * 4)) for rows in (1, 4)],
        lambda: store.extra("loss"),
        store.ids,
    ]
    path, right = tmp_path / SHARD, [reader() for reader in readers]
    assert [len(block) for block in store.blocks(WIDTH * 4)] == [1] * 10
    for place in range(0, path.stat().st_size, 3):
        flip(path, place, bit=0x40)
        for reader, before in zip(readers, right, strict=True):
            text = result_or_error(reader)
            refusal = re.search(f"{SHARD} is damaged: .*; {REBUILD}", text)
            assert refusal or text == str(before), place
        # a shard is opened before it is read
        with pytest.raises(ValueError, match=f"{SHARD} (is damaged|belongs to)"):
            Store.open(tmp_path, verify=True)
        flip(path, place, bit=0x40)
    assert str([reader() for reader in readers]) == str(right)


def test_the_part_that_changed_is_found_in_any_dtype_and_width(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for width in (1, 3, 127, 400):
            folder = tmp_path / f"{dtype}-{width}"
            store = build(folder, columns={"fc": width}, dtype=dtype)
            rows = torch.cat(list(store.blocks(10**6)))
            path = folder / SHARD
            content = path.read_bytes()
            start = content.index(rows[4:8].view(torch.uint8).numpy().tobytes())
            flip(path, start + 2 * width)
            with pytest.raises(ValueError, match="the checksum of its gradients differs"):
                list(store.blocks(10**6))


def test_a_checksum_depends_on_every_bit_and_on_the_order_of_sectors() -> None:
    rows = torch.randn(9, 333)
    before = checksum(rows)
    assert checksum(rows.clone()) == before
    content = rows.view(torch.uint8).view(-1)
    for place in range(0, len(content), 7):
        content[place] ^= 1 << place % 8
        assert checksum(rows) != before
        content[place] ^= 1 << place % 8
    assert checksum(rows) == before
    swapped = content.clone()
    swapped[:512], swapped[512:1024] = content[512:1024], content[:512]
    assert checksum(swapped) != before == checksum(content)


def test_a_shard_of_another_store_or_place_is_found_out(tmp_path: Path) -> None:
    build(tmp_path / "a")
    build(tmp_path / "b", settings={"model": "other"})
    for wrong in (tmp_path / "b" / SHARD, tmp_path / "a" / "shard-00000.safetensors"):
        (tmp_path / "a" / SHARD).write_bytes(wrong.read_bytes())
        refused(tmp_path / "a", f"{SHARD} belongs to another store, or to another place in it; ")


def test_foreign_safetensors_are_found_out(tmp_path: Path) -> None:
    build(tmp_path)
    save_file({"gradients": torch.ones(1)}, tmp_path / SHARD)
    refused(tmp_path, f"{SHARD} is damaged")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff" * 4000, b"{}" * 3])
def test_what_is_no_safetensors_is_found_out(tmp_path: Path, content: bytes) -> None:
    build(tmp_path)
    (tmp_path / SHARD).write_bytes(content)
    refused(tmp_path, f"{SHARD} is damaged")


def test_damaged_and_missing_shards_are_written_anew_by_the_same_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path)
    before = contents(tmp_path)
    flip(tmp_path / SHARD, -1)
    (tmp_path / "shard-00002.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        store = begin(tmp_path)
        assert store.missing() == [(1, 4, 8), (2, 8, 10)]
    assert f"{SHARD} is written anew: it is damaged: the checksum of its " in caplog.text
    fill(store)
    store.finish()
    assert contents(tmp_path) == before


def test_an_unfinished_store_says_how_far_it_is(tmp_path: Path) -> None:
    store = begin(tmp_path)
    fill(store, [0, 2])
    for look in (lambda: Store.open(tmp_path), store.finish):
        with pytest.raises(ValueError, match=f"is not finished: 2 of 3 shards are there; {AGAIN}"):
            look()


def test_no_store_is_told_as_such(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"no store in .*schema.json is missing"):
            Store.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, r"'version': 1.* and this isokron .* reads .*'version': 5.*; build"),
        ({"format": "zip"}, "'zip'.* and this isokron"),
        ({"examples": 9}, "belongs to another store"),
        ({"settings": {}}, "belongs to another store"),
        ({"columns": {"fc": 22}}, "belongs to another store"),
        ({"shards": []}, "is damaged: .*unexpected keyword argument 'shards'"),
    ],
)
def test_a_changed_schema_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    build(tmp_path)
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refused(tmp_path, message)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"])
def test_a_schema_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    build(tmp_path)
    (tmp_path / "schema.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(tmp_path, r"schema.json is damaged, not JSON")
