"""A store that is not whole, or not the one it says, is found out, by name and with a remedy."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_store import SCHEMA, build, contents, fill, gradients

from isokron.attribution.store import Store, StoreWriter

SHARD = "shard-00001.safetensors"
AGAIN = "run the same build command again"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_truncated_shard_is_told_with_both_sizes(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / SHARD
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(
        ValueError, match=f"{SHARD} .* size in bytes was {size} and is now {size - 1}"
    ):
        Store.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / SHARD).unlink()
    with pytest.raises(ValueError, match=f"{SHARD} is missing; {AGAIN}"):
        Store.open(tmp_path)


def test_every_flipped_bit_is_found_in_full_verification(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / SHARD
    size = path.stat().st_size
    for place in [*range(0, size, 37), size - 1]:
        flip(path, place)
        with pytest.raises(ValueError, match=f"{SHARD} is damaged or foreign: SHA-256 was"):
            Store.open(tmp_path, verify="full")
        flip(path, place)
    Store.open(tmp_path, verify="full")


def test_a_flipped_bit_in_the_head_is_found_when_opened(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / SHARD
    head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for place in [*range(8), *range(8, head, 7), head - 1]:
        flip(path, place)
        with pytest.raises(ValueError, match=f"{SHARD} is damaged or foreign: .* was .*; {AGAIN}"):
            Store.open(tmp_path)
        flip(path, place)


def test_a_shard_of_another_store_is_found_out(tmp_path: Path) -> None:
    one = build(tmp_path / "a").schema.digest
    other = build(tmp_path / "b", settings={"model": "other"}).schema.digest
    (tmp_path / "b" / SHARD).replace(tmp_path / "a" / SHARD)
    with pytest.raises(
        ValueError, match=f"{SHARD} .*settings was '{one}' and is now '{other}'; run"
    ):
        Store.open(tmp_path / "a")


def test_a_shard_in_the_place_of_another_is_found_out(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / SHARD).write_bytes((tmp_path / "shard-00000.safetensors").read_bytes())
    with pytest.raises(ValueError, match=f"{SHARD} .*first_example was 4 and is now 0; run"):
        Store.open(tmp_path)


def test_foreign_safetensors_of_the_same_size_are_found_out(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / SHARD
    size = path.stat().st_size
    save_file({"gradients": torch.ones(1)}, path)
    path.write_bytes(path.read_bytes().ljust(size, b"\0"))
    with pytest.raises(ValueError, match=f"{SHARD} is damaged or foreign: .* is now"):
        Store.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff" * 4000, b"{}" * 3])
def test_what_is_no_safetensors_is_found_out(tmp_path: Path, content: bytes) -> None:
    build(tmp_path)
    path = tmp_path / SHARD
    path.write_bytes(content.ljust(path.stat().st_size, b"\xff")[: path.stat().st_size])
    with pytest.raises(
        ValueError, match=f"{SHARD} is damaged or foreign: .*header was None and is now"
    ):
        Store.open(tmp_path)


def test_a_damaged_shard_is_written_anew_by_the_same_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path)
    before = contents(tmp_path)
    flip(tmp_path / SHARD, -1)
    (tmp_path / "shard-00002.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        writer = StoreWriter.open(tmp_path, **SCHEMA)
        assert writer.missing() == [(1, 4, 8), (2, 8, 10)]
    assert f"{SHARD} is written anew" in caplog.text
    fill(writer)
    writer.finish()
    assert contents(tmp_path) == before


def test_a_damaged_record_is_written_anew(tmp_path: Path) -> None:
    build(tmp_path / "straight")
    folder = tmp_path / "store"
    writer = StoreWriter.open(folder, **SCHEMA)
    fill(writer)
    (folder / "shard-00000.json").write_text("{")
    (folder / "shard-00001.json").write_text('{"file": 3}')
    (folder / "shard-00002.json").write_bytes((folder / "shard-00002.json").read_bytes()[:-20])
    assert [span.number for span in writer.missing()] == [0, 1, 2]
    with pytest.raises(ValueError, match="not finished: 0 of 3 shards are there"):
        writer.finish()
    build(folder)
    assert contents(folder) == contents(tmp_path / "straight")


def test_an_unfinished_store_says_how_far_it_is(tmp_path: Path) -> None:
    writer = StoreWriter.open(tmp_path, **SCHEMA)
    fill(writer, [0, 2])
    for look in (lambda: Store.open(tmp_path), writer.finish):
        with pytest.raises(ValueError, match=f"is not finished: 2 of 3 shards are there; {AGAIN}"):
            look()


def test_no_store_is_told_as_such(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"no store in .*manifest.json is missing"):
            Store.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, r"none of this isokron .*: version was 2 and is now 1; build"),
        ({"format": "zip"}, "format was 'isokron gradient store' and is now 'zip'"),
        ({"examples": 9}, "is damaged: checksum was .* and is now"),
        ({"settings": {}}, "is damaged: checksum"),
        ({"shards": []}, "is damaged: checksum"),
        ({"checksum": None}, "is damaged: checksum"),
    ],
)
def test_a_changed_manifest_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    build(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        Store.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"])
def test_a_manifest_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    build(tmp_path)
    (tmp_path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"manifest.json is damaged, not JSON"):
        Store.open(tmp_path)


def test_shards_with_other_tensors_are_refused_at_the_end(tmp_path: Path) -> None:
    writer = StoreWriter.open(tmp_path, **SCHEMA)
    fill(writer, [0, 1])
    writer.write(2, gradients(8, 10), ids=["a", "b"])
    with pytest.raises(ValueError, match=r"same tensors, shard-00002.* has \['gradients', 'ids'\]"):
        writer.finish()
