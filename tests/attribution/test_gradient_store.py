"""A gradient store gives back what was written, at the cost of what is read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_store import COLUMNS, SCHEMA, WIDTH, begin, build, contents, fill, gradients

import isokron
from isokron.attribution.store import Store, read_entries, write_entries


def test_a_store_gives_back_what_was_written(tmp_path: Path) -> None:
    build(tmp_path / "new" / "store")
    store = Store.open(tmp_path / "new" / "store", verify=True)
    assert (len(store), store.schema.width, store.dtype) == (10, 22, torch.float32)
    assert torch.cat(list(store.blocks(1000))).equal(gradients(0, 10))
    assert store.extra("loss").equal(torch.arange(10) / 2)
    assert store.ids() == [f"é-{k}" for k in range(10)]
    assert store.schema.settings == SCHEMA["settings"]
    assert store.columns("fc2") == slice(12, 22)


def test_the_folder_holds_shards_and_a_schema_only(tmp_path: Path) -> None:
    build(tmp_path)
    shards = [f"shard-0000{k}.safetensors" for k in range(3)]
    assert sorted(contents(tmp_path)) == ["schema.json", *shards]
    assert json.loads((tmp_path / "schema.json").read_text())["columns"] == COLUMNS


def test_a_shard_is_plain_safetensors_that_says_what_it_belongs_to(tmp_path: Path) -> None:
    store = build(tmp_path, dtype="bfloat16")
    path = tmp_path / "shard-00001.safetensors"
    assert load_file(path)["gradients"].equal(gradients(4, 8).bfloat16())
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["isokron"])
    assert (header["schema"], header["first"]) == (store.schema.digest(), 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_keep_to_memory_and_shards(tmp_path: Path, dtype: str) -> None:
    store = build(tmp_path, dtype=dtype)
    row = WIDTH * store.dtype.itemsize
    for memory, sizes in [
        (row, [1] * 10),
        (3 * row + 1, [3, 1, 3, 1, 2]),
        (10**9, [4, 4, 2]),
    ]:
        blocks = list(store.blocks(memory))
        assert [len(rows) for rows in blocks] == sizes
        assert torch.cat(blocks).equal(gradients(0, 10).to(store.dtype))
    with pytest.raises(ValueError, match=f"memory must hold a row of {row} bytes, got {row - 1}"):
        next(store.blocks(row - 1))


def test_writing_to_what_was_read_leaves_the_file_alone(tmp_path: Path) -> None:
    store, before = build(tmp_path), contents(tmp_path)
    next(store.blocks(10**6)).zero_()
    assert contents(tmp_path) == before
    assert next(store.blocks(10**6)).equal(gradients(0, 4))


def test_gradients_of_another_layout_and_dtype_are_stored_alike(tmp_path: Path) -> None:
    build(tmp_path / "a", examples=4)
    store = begin(tmp_path / "b", examples=4)
    turned = gradients(0, 4).double().mT.contiguous().mT.requires_grad_()
    store.write(0, turned, [f"é-{k}" for k in range(4)], {"loss": torch.arange(8)[::2] / 4})
    store.finish()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_finished_store_has_nothing_missing_and_is_left_as_it_is(tmp_path: Path) -> None:
    build(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert begin(tmp_path).missing() == []
    build(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_with_every_difference(tmp_path: Path, finished: bool) -> None:
    fill(begin(tmp_path), None if finished else [0])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="has another store") as caught:
        begin(
            tmp_path,
            settings={"model": "big", "dim": 3, "seed": 7},
            columns={**COLUMNS, "fc2": 11, "fc3": 1},
            examples=11,
            dtype="float16",
        )
    for line in [
        "model was 'toy', is 'big'",
        "seed was 0, is 7",
        "columns of fc2 was 10, is 11",
        "columns of fc3 was None, is 1",
        "examples was 10, is 11",
        "dtype was 'float32', is 'float16'",
    ]:
        assert line in str(caught.value)
    assert "dim was" not in str(caught.value)
    assert contents(tmp_path) == before


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / "schema.json"
    # as stores of projected rows were written before
    older = {**json.loads(path.read_text()), "version": 3, "generator": "shake-256 fold v1"}
    del older["entries"]
    path.write_text(json.dumps(older))
    for look in (Store.open, begin):
        with pytest.raises(ValueError, match=r"'version': 3.* reads .*5.*; build the store anew"):
            look(tmp_path)


def test_entries_that_are_damaged_or_of_another_store_are_refused(tmp_path: Path) -> None:
    entries = {"fc1": torch.arange(12).int(), "fc2": torch.arange(10).int()}
    digest = write_entries(tmp_path, entries)
    store = build(tmp_path, entries=digest)
    stored = read_entries(tmp_path, store.schema)
    assert all(stored[name].equal(entries[name]) for name in entries)
    write_entries(tmp_path, {**entries, "fc2": torch.arange(1, 11).int()})
    with pytest.raises(ValueError, match=r"entries.safetensors is damaged: .*; delete the folder"):
        read_entries(tmp_path, store.schema)
    with pytest.raises(ValueError, match=f"entries was '{digest}', is 'other'"):
        begin(tmp_path, entries="other")
    for damage in ("cut", "gone"):
        path = tmp_path / "entries.safetensors"
        path.write_bytes(path.read_bytes()[:9]) if damage == "cut" else path.unlink()
        with pytest.raises(ValueError, match=r"entries.safetensors cannot be read: .*; delete the"):
            read_entries(tmp_path, store.schema)


def test_other_peoples_files_are_never_mixed_with(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has other files in it \(such as thesis.txt\); give"):
        begin(tmp_path)


@pytest.mark.parametrize("value", [1e6, -1e6, float("nan"), float("inf"), float("-inf")])
def test_gradients_that_float16_cannot_hold_are_named(tmp_path: Path, value: float) -> None:
    store = begin(tmp_path, dtype="float16")
    wrong = gradients(4, 8)
    wrong[2, 3] = value
    with pytest.raises(
        ValueError, match=r"those of example 6 are not in torch.float16; store them"
    ):
        store.write(1, wrong, list("abcd"), {})
    assert list(contents(tmp_path)) == ["schema.json"]


MEASURE = """
import sys, torch
from isokron.attribution.store import Store, read_entries, write_entries

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.ones(64, 64) @ torch.ones(64)  # what torch itself takes the first time
start = resident()
store = Store.open(sys.argv[1])
opened = resident() - start
most = 0
for rows in store.blocks(4 << 20):
    rows.sum()
    most = max(most, resident() - start)
print(opened, most)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_reads_nothing_and_a_scan_holds_one_block(tmp_path: Path) -> None:
    build(tmp_path, columns={"fc": 1 << 17}, examples=64, examples_per_shard=16)  # 32 MiB
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(isokron.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    opened, most = map(int, done.stdout.split())
    assert opened < 4 << 20
    assert most < 12 << 20
